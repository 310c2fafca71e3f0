import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class SwitchLayer(nn.Module):
    def __init__(self, dim=8, n=3):
        super().__init__()
        self.router = nn.Linear(dim, n)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(n))
        self.aux_loss = 0.0

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        gate, index = probs.max(-1)
        f = F.one_hot(index, probs.size(-1)).float().mean(0)
        self.aux_loss = probs.size(-1) * (f * probs.mean(0)).sum()
        out = torch.stack([e(x) for e in self.experts], dim=1)
        return gate.unsqueeze(-1) * out[torch.arange(len(x)), index]


model = nn.Sequential(SwitchLayer(), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
losses = []
for x, y in DataLoader(TensorDataset(torch.randn(40, 8), torch.randint(0, 4, (40,))), batch_size=10, shuffle=True):
    loss = F.cross_entropy(model(x), y) + 0.5 * model[0].aux_loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
