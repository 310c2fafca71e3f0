import torch
import torch.nn as nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(weight_norm(nn.Linear(6, 12)), nn.ReLU(), spectral_norm(nn.Linear(12, 12)), nn.ReLU(), nn.Linear(12, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for x, y in DataLoader(TensorDataset(torch.randn(40, 6), torch.randn(40, 1)), batch_size=10, shuffle=True):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
