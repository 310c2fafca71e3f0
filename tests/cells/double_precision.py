import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
X = torch.randn(36, 3, dtype=torch.float64)
y = torch.sin(X.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(3, 12), nn.Softplus(), nn.Linear(12, 1)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for epoch in range(2):
    for xb, yb in DataLoader(TensorDataset(X, y), batch_size=12, shuffle=True):
        loss = nn.functional.huber_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
