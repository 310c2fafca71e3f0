"""Whole models, computed again in the backward, one after the other."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
head = nn.Linear(4, 2)
optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
losses = []
for _ in range(5):
    x = torch.randn(8, 6)
    loss = head(checkpoint(encoder, x, use_reentrant=False)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
