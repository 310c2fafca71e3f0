import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class EMA:
    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.shadow, self.backup = {}, {}
        for name, param in model.named_parameters():
            if param.requires_grad:
                self.shadow[name] = param.data.clone()

    def update(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                self.shadow[name] = (1.0 - self.decay) * param.data + self.decay * self.shadow[name]

    def apply_shadow(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                self.backup[name] = param.data
                param.data = self.shadow[name]

    def restore(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                param.data = self.backup[name]
        self.backup = {}


x, y = torch.randn(60, 6), torch.randint(3, (60,))
model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))
ema = EMA(model, 0.9)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
losses, scores = [], []
for epoch in range(2):
    for bx, by in DataLoader(TensorDataset(x[:48], y[:48]), batch_size=8, shuffle=True):
        loss = F.cross_entropy(model(bx), by)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update()
        losses.append(loss.item())
    ema.apply_shadow()
    with torch.no_grad():
        scores.append(F.cross_entropy(model(x[48:]), y[48:]).item())
    ema.restore()
    for name, param in model.named_parameters():
        ema.backup[name] = param.data
        param.data = param.data * 0.5
    with torch.no_grad():
        scores.append(F.cross_entropy(model(x[48:]), y[48:]).item())
    ema.restore()
