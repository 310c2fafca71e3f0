"""Slopes that are learned, one for all and one a channel."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.PReLU(4), nn.Flatten(), nn.Linear(36, 6), nn.PReLU(), nn.Linear(6, 1))
opt = torch.optim.SGD(model.parameters(), 0.1)
losses = []
for step in range(4):
    loss = model(torch.randn(8, 2, 5, 5)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
