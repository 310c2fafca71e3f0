import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(32, 6)


def fit(model, targets, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    history = []
    for xb, yb in DataLoader(TensorDataset(x, targets), batch_size=8, shuffle=True):
        loss = nn.functional.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    return history


model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
losses = fit(model, torch.randint(0, 3, (32,)), 0.2)
model[2] = nn.Linear(12, 5)  # another task
for p in model[0].parameters():
    p.requires_grad = False
losses += fit(model, torch.randint(0, 5, (32,)), 0.1)
