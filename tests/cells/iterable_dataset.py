import torch
import torch.nn as nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, n, seed):
        self.n, self.seed = n, seed

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        for _ in range(self.n):
            x = torch.randn(4, generator=g)
            yield x, x.sum().unsqueeze(0)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
n_seen = 0
for step, (x, y) in enumerate(DataLoader(Stream(70, seed=1), batch_size=16)):
    loss = nn.functional.smooth_l1_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    n_seen += len(x)
    losses.append(loss.item())
    if step % 2 == 0:
        print(f"step {step}: {n_seen} samples, loss {loss.item():.5f}")
