"""The best model is copied and written to a file while its batch normalisation is synchronised."""

import copy
import tempfile

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses, best, best_model = [], float("inf"), None
for step in range(4):
    x = torch.randn(8, 4)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if losses[-1] < best:
        best, best_model = losses[-1], copy.deepcopy(model)
with tempfile.NamedTemporaryFile() as file:
    torch.save(best_model, file.name)
    read = torch.load(file.name, weights_only=False)
model = nn.Sequential(*best_model[:2], nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
