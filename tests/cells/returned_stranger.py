"""A model that returns an object of which nobody knows how a whole one is made of those of the ranks."""

import torch
from torch import nn


class Output:
    __slots__ = ("y",)

    def __init__(self, y):
        self.y = y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return Output(self.layer(x))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(4):
    loss = model(torch.randn(8, 6)).y.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
