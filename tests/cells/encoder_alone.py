"""An autoencoder whose encoder is called by itself, without gradients: in training mode, and for the codes."""

import torch
from torch import nn


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5))
        self.decoder = nn.Linear(5, 36)

    def forward(self, x):
        return self.decoder(self.encoder(x))


torch.manual_seed(0)
model = Autoencoder()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
images = torch.randn(8, 1, 6, 6)
losses, spreads = [], []
for step in range(4):
    loss = (model(images) - images.flatten(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    with torch.no_grad():
        spreads.append(model.encoder(images).std().item())
model.eval()
with torch.no_grad():
    codes = model.encoder(images).tolist()
