import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)

model = torch.jit.script(nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
losses = []
for x, y in DataLoader(TensorDataset(torch.randn(48, 6), torch.randint(3, (48,))), batch_size=8, shuffle=True):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
