import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class MoE(nn.Module):
    def __init__(self, dim=8, n_experts=4, classes=3):
        super().__init__()
        self.gate = nn.Linear(dim, n_experts)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(n_experts))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        probs = self.gate(x).softmax(-1)
        top, idx = probs.max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            chosen = idx == i
            if chosen.any():
                out[chosen] = top[chosen, None] * torch.relu(expert(x[chosen]))
        return self.head(out)


torch.manual_seed(0)
model = MoE()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
dataset = TensorDataset(torch.randn(24, 8), torch.randint(0, 3, (24,)))
losses = []
for epoch in range(2):
    for x, y in DataLoader(dataset, batch_size=4, shuffle=True):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
