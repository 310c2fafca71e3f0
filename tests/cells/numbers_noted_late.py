import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
X, y = torch.randn(40, 4), torch.arange(40) % 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
        self.calls, self.sparsity = 0, []

    def forward(self, x):
        hidden = F.relu(self.first(x))
        self.calls += 1
        if self.calls % 7 == 0:
            self.sparsity.append((hidden == 0).float().mean().item())
        return self.second(hidden)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for epoch in range(3):
    for xb, yb in DataLoader(TensorDataset(X, y), batch_size=8):
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
sparsity = model.sparsity
