import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


def train_step(x, y):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def find_lr(loader, steps):
    saved, found = copy.deepcopy((model.state_dict(), optimizer.state_dict())), []
    batches = iter(loader)
    for step in range(steps):
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, y = next(batches)
        found.append((train_step(x, y), optimizer.param_groups[0]["lr"]))
        optimizer.param_groups[0]["lr"] *= 1.5
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return min(found)[1]


optimizer.param_groups[0]["lr"] = find_lr(DataLoader(dataset, batch_size=16, shuffle=True), 18)
losses = []
for epoch in range(2):
    for x, y in DataLoader(dataset, batch_size=16, shuffle=True):
        losses.append(train_step(x, y))
