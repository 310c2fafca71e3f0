import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
X, y = torch.randn(42, 4), torch.arange(42) % 3
shift = np.random.default_rng(3)


class Noise:
    def __init__(self):
        self.rng = np.random.default_rng(1)

    def __call__(self, x):
        return x + torch.from_numpy(self.rng.normal(0, 0.3, 4)).float()


class Noisy(Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 42

    def __getitem__(self, index):
        return self.transform(X[index]), y[index]


class Shifted(Noisy):
    def __getitem__(self, index):
        return X[index] + float(shift.normal(0, 0.3)), y[index]


class Counting(Noisy):
    seen = 0

    def __getitem__(self, index):
        Counting.seen += 1
        self.transform[index] += 1
        return X[index], y[index]


losses = []
hits = [0] * 42
for data in (Noisy(Noise()), Shifted(None), Counting(hits)):
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for xb, yb in DataLoader(data, batch_size=8, shuffle=True):
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
seen = Counting.seen
