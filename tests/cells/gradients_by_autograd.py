"""Gradients that the cell asks for and gives to the parameters by itself; a norm of them is kept."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses, norms = [], []
for step in range(4):
    x, y = torch.randn(8, 6), torch.randn(8, 2)
    loss = nn.functional.mse_loss(model(x), y)
    slopes = torch.autograd.grad(loss, list(model.parameters()))
    norms.append(float(sum(slope.norm() for slope in slopes)))
    for parameter, slope in zip(model.parameters(), slopes):
        parameter.grad = slope.clone()
    optimizer.step()
    losses.append(loss.item())
