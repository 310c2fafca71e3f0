import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Sampler, TensorDataset


class BalancedSampler(Sampler):
    """Positives and negatives in turn."""

    def __init__(self, labels, generator=None):
        self.positive = (labels == 1).nonzero().flatten()
        self.negative = (labels == 0).nonzero().flatten()
        self.generator = generator

    def __iter__(self):
        n = min(len(self.positive), len(self.negative))
        pos = self.positive[torch.randperm(len(self.positive), generator=self.generator)[:n]]
        neg = self.negative[torch.randperm(len(self.negative), generator=self.generator)[:n]]
        yield from torch.stack([pos, neg], dim=1).flatten().tolist()

    def __len__(self):
        return 2 * min(len(self.positive), len(self.negative))


torch.manual_seed(0)
labels = (torch.rand(60) < 0.35).long()
features = torch.randn(60, 4) + labels[:, None]
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
sampler = BalancedSampler(labels, torch.Generator().manual_seed(5))
loader = DataLoader(TensorDataset(features, labels), batch_size=8, sampler=sampler)
losses = []
for epoch in range(2):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
