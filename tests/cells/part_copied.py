"""A part of a model is copied when the training is over."""

import copy

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(4):
    loss = model(torch.randn(8, 6)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
encoder = copy.deepcopy(model[0])
