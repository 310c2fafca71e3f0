import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
compiled = torch.compile(model, backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for x, y in DataLoader(TensorDataset(torch.randn(48, 6), torch.randn(48, 1)), batch_size=12, shuffle=True):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(compiled(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
