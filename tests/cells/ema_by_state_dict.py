import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.words(x).mean(1))))


def update(ema, model, decay):
    current = model.state_dict()
    for name, value in ema.state_dict().items():
        if value.dtype.is_floating_point:
            value.copy_(decay * value + (1 - decay) * current[name])


torch.manual_seed(0)
model = Model()
ema = copy.deepcopy(model).eval().requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
words = torch.randint(12, (40, 6))
losses, distilled = [], []
for epoch in range(2):
    for x in DataLoader(words, batch_size=8, shuffle=True):
        with torch.no_grad():
            target = F.softmax(ema(x), -1)
        out = model(x[:, 1:])
        loss = F.cross_entropy(out, x[:, 0]) + F.kl_div(F.log_softmax(out, -1), target, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update(ema, model, 0.8)
        losses.append(loss.item())
    ema.state_dict()["norm.bias"].data.mul_(0.5)
    distilled.append(ema.words.weight.abs().sum().item())
