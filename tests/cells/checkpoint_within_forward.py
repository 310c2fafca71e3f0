"""A part of a model is computed again in the backward, and another model is called after it."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False)


torch.manual_seed(0)
model, head = Encoder(), nn.Linear(4, 2)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
losses = []
for _ in range(5):
    x = torch.randn(8, 6)
    loss = head(model(x)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
