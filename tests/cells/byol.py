import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

torch.manual_seed(0)
online = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))
predictor = nn.Linear(6, 6)
target = copy.deepcopy(online)
target.requires_grad_(False)
optimizer = torch.optim.SGD([*online.parameters(), *predictor.parameters()], lr=0.1)
tau = 0.9


def regression_loss(p, z):
    return 2 - 2 * (F.normalize(p, dim=-1) * F.normalize(z, dim=-1)).sum(dim=-1)


losses = []
for x in DataLoader(torch.randn(40, 8), batch_size=10, shuffle=True):
    v1, v2 = x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)
    with torch.no_grad():
        t1, t2 = target(v1), target(v2)
    loss = (regression_loss(predictor(online(v1)), t2) + regression_loss(predictor(online(v2)), t1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for o, t in zip(online.parameters(), target.parameters()):
        t.data = tau * t.data + (1 - tau) * o.data
    losses.append(loss.item())
model = online
