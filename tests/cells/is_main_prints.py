import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

import jupyter_torchdist as td

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for x, y in DataLoader(TensorDataset(torch.randn(40, 4), torch.randn(40, 1)), batch_size=10, shuffle=True):
    loss = nn.functional.mse_loss(model(x), y)
    if td.is_main:
        print("before", loss.item())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if td.is_main:
        print("after", loss.item())
        losses.append(loss.item())
