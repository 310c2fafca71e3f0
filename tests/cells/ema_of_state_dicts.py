"""An average of weights by two state dicts at once, as timm keeps it; evaluated after each epoch."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class ModelEma(nn.Module):
    def __init__(self, model, decay=0.9):
        super().__init__()
        self.module = copy.deepcopy(model)
        self.module.eval()
        self.decay = decay

    def update(self, model):
        with torch.no_grad():
            for average, value in zip(self.module.state_dict().values(), model.state_dict().values()):
                average.copy_(self.decay * average + (1.0 - self.decay) * value)


torch.manual_seed(0)
X, Y = torch.randn(64, 10), torch.randint(0, 4, (64,))
model = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
ema = ModelEma(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
losses, averaged = [], []
for epoch in range(3):
    for x, y in DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        ema.update(model)
        losses.append(loss.item())
    with torch.no_grad():
        averaged.append(F.cross_entropy(ema.module(X), Y).item())
