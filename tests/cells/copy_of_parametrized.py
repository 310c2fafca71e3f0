import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import weight_norm

torch.manual_seed(0)
x = torch.randn(64, 12)
model = nn.Sequential(nn.Linear(12, 16), nn.GELU(), weight_norm(nn.Linear(16, 10, bias=False)))
teacher = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for step in range(4):
    batch = x[16 * step : 16 * step + 16]
    with torch.no_grad():
        target = F.softmax(teacher(batch) / 0.1, -1)
    loss = F.cross_entropy(model(batch + 0.1 * torch.randn_like(batch)), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
