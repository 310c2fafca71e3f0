"""Layers whose sizes are found in the first forward, after the optimizer was built."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.LazyConv1d(4, 3), nn.LazyBatchNorm1d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(5):
    loss = F.cross_entropy(model(torch.randn(8, 2, 7)), torch.randint(0, 3, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
