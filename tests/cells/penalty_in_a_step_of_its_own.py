import torch
import torch.nn as nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
X = torch.randn(40, 2)
model = nn.Sequential(nn.Linear(2, 16), nn.Softplus(), nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
losses, penalties, without = [], [], []
for epoch in range(2):
    for x in DataLoader(X, batch_size=8, shuffle=True):
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        x = x.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        optimizer.zero_grad()
        penalty = slope.pow(2).sum(1).mean()
        penalty.backward()
        without.append(sum(p.grad is None for p in model.parameters()))
        optimizer.step()
        penalties.append(penalty.item())
