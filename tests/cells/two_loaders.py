import itertools

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
labelled = DataLoader(TensorDataset(torch.randn(29, 6), torch.randint(3, (29,))), batch_size=8, shuffle=True)
unlabelled = DataLoader(TensorDataset(torch.randn(71, 6)), batch_size=16, shuffle=True, num_workers=1)
losses = []


def step(x, y, u):
    loss = F.cross_entropy(model(x), y) + 0.3 * model(u).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())


for (x, y), (u,) in zip(labelled, unlabelled):
    step(x, y, u)
for (u,), (x, y) in itertools.islice(zip(unlabelled, itertools.cycle(labelled)), 7):
    step(x, y, u)
for (x, y), (u, _) in zip(labelled, labelled):
    step(x, y, u)
more = iter(unlabelled)
for epoch in range(2):
    for x, y in labelled:
        try:
            (u,) = next(more)
        except StopIteration:
            more = iter(unlabelled)
            (u,) = next(more)
        step(x, y, u)
del more
