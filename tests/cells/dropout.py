import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
ds = TensorDataset(torch.randn(40, 10), torch.randint(0, 3, (40,)))
losses = []
for epoch in range(2):
    model.train()
    for xb, yb in DataLoader(ds, batch_size=20, shuffle=True):
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
model.eval()
