import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
X, y = torch.randn(42, 4), torch.arange(42) % 3
rng, sizes = random.Random(3), []


def noisy(items):
    sizes.append(len(items))
    return torch.stack([x for x, _ in items]) + rng.gauss(0, 0.5), torch.stack([label for _, label in items])


model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for epoch in range(2):
    for xb, yb in DataLoader(TensorDataset(X, y), batch_size=8, shuffle=True, collate_fn=noisy):
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
