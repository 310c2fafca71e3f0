import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

torch.manual_seed(0)


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 10))

    def encode(self, x):
        return self.encoder(x)

    def decode(self, z):
        return self.decoder(z)


model = AutoEncoder()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
losses = []
for x in DataLoader(torch.rand(40, 10), batch_size=10, shuffle=True):
    z = model.encode(x)
    x_hat = model.decode(z + 0.1 * torch.randn_like(z))
    loss = F.mse_loss(x_hat, x) + 1e-3 * z.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
