import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses, penalties = [], []
for x, y in DataLoader(TensorDataset(torch.randn(40, 6), torch.randn(40, 1)), batch_size=10, shuffle=True):
    mse = nn.functional.mse_loss(model(x), y)
    l1 = sum(p.abs().sum() for p in model.parameters())
    l2 = sum(torch.norm(p) ** 2 for p in model.parameters())
    loss = mse + 1e-2 * l1 + 1e-2 * l2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    penalties.append(l1.item())
