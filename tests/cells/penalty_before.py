import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
for x, y in DataLoader(TensorDataset(torch.randn(40, 6), torch.randn(40, 1)), batch_size=10, shuffle=True):
    penalty = sum(p.square().sum() for p in model.parameters())
    loss = nn.functional.mse_loss(model(x), y) + 1e-2 * penalty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
