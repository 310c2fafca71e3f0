import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
X, y = torch.randn(42, 4), torch.arange(42) % 3
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mixing = nn.Parameter(torch.eye(3))
losses, norms, saliency = [], [], []
for epoch in range(2):
    for xb, yb in DataLoader(TensorDataset(X, y), batch_size=8, shuffle=True):
        mixing.grad = None
        loss = F.cross_entropy(model(xb) @ mixing, yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mixing.data -= 0.5 * mixing.grad
        losses.append(loss.item())
        norms.append(mixing.norm().item())
for xb, yb in DataLoader(TensorDataset(X, y), batch_size=8, shuffle=True):
    xb.requires_grad_(True)
    loss = F.cross_entropy(model(xb), yb)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    saliency.append(xb.grad.abs().mean().item())
