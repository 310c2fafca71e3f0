import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 3))
base = torch.optim.SGD(model.parameters(), lr=0.2)
rho = 0.05
losses = []
for x, y in DataLoader(TensorDataset(torch.randn(32, 5), torch.randint(0, 3, (32,))), batch_size=8, shuffle=True):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        steps = [p.grad * (rho / (norm + 1e-12)) for p in model.parameters()]
        for p, e in zip(model.parameters(), steps):
            p.add_(e)
    base.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p, e in zip(model.parameters(), steps):
            p.sub_(e)
    base.step()
    base.zero_grad()
    losses.append(loss.item())
