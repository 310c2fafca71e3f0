"""Outputs of a layer and of the model are views, and are changed in place."""

import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
            y += 1
            x = x + y
        return self.head(x)


torch.manual_seed(0)
x, y = torch.randn(64, 5, 8), torch.randn(64, 5, 4)
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for epoch in range(2):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=16):
        out = model(a)
        out += 1
        loss = F.mse_loss(out, b)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
