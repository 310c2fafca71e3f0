import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(48, 6), torch.randint(0, 3, (48,))
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
losses = []
for epoch in range(3):
    for xb, yb in DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for xb, yb in DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(xb), yb, reduction="sum")
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for xb, yb in DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True):
        optimizer.zero_grad()
        z = F.normalize(model(xb), dim=1)
        loss = (z @ z.T).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
