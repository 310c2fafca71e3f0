import random

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset


class Sentences(Dataset):
    def __init__(self):
        rng = random.Random(0)
        self.items = [torch.tensor([rng.randrange(1, 30) for _ in range(rng.randint(3, 12))]) for _ in range(40)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        s = self.items[i]
        return s, float((s % 2 == 0).float().mean())


class BucketBatchSampler:
    """Sentences of like length together, so that little is padded."""

    def __init__(self, dataset, batch_size, seed=0):
        order = sorted(range(len(dataset)), key=lambda i: len(dataset.items[i]))
        self.batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
        self.rng = random.Random(seed)

    def __iter__(self):
        self.rng.shuffle(self.batches)
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(30, 8, padding_idx=0)
        self.fc = nn.Linear(8, 1)

    def forward(self, tokens):
        mask = (tokens != 0).unsqueeze(-1)
        mean = (self.emb(tokens) * mask).sum(1) / mask.sum(1)
        return self.fc(mean).squeeze(1)


torch.manual_seed(0)
ds = Sentences()
collate = lambda b: (pad_sequence([s for s, _ in b], batch_first=True), torch.tensor([t for _, t in b]))
loader = DataLoader(ds, batch_sampler=BucketBatchSampler(ds, 7), collate_fn=collate)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
losses = []
for tokens, target in loader:
    loss = ((model(tokens) - target) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
