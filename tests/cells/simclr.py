import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

torch.manual_seed(0)
data = torch.randn(32, 10)
model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 6))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def augment(x):
    return x + 0.1 * torch.randn_like(x)


def nt_xent(z, temperature=0.5):
    z = F.normalize(z, dim=1)
    sim = z @ z.t() / temperature
    sim.fill_diagonal_(float("-inf"))
    n = len(z) // 2
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(sim, target)


losses = []
for x in DataLoader(data, batch_size=8, shuffle=True):
    views = torch.cat([augment(x), augment(x)])
    loss = nt_xent(model(views))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
