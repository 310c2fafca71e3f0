"""Batch normalisation that also counts what is generated between the steps, in training mode and without gradients."""

import torch
from torch import nn

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
fixed_noise = torch.randn(5, 4)
losses, samples = [], []
for step in range(4):
    x = torch.randn(8, 4)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    with torch.no_grad():
        samples.append(model(fixed_noise).norm().item())
torch.set_default_dtype(torch.float32)
