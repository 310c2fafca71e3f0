import random

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

PAD = 0
random.seed(0)
torch.manual_seed(0)
corpus = [[random.randrange(1, 20) for _ in range(random.randint(2, 9))] for _ in range(32)]


def collate(batch):
    seqs = [torch.tensor(s) for s in batch]
    x = pad_sequence([s[:-1] for s in seqs], batch_first=True, padding_value=PAD)
    y = pad_sequence([s[1:] for s in seqs], batch_first=True, padding_value=PAD)
    return x, y


class Tagger(nn.Module):
    def __init__(self, vocab=20, dim=12):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, x):
        h, _ = self.rnn(self.emb(x))
        return self.out(h)


model = Tagger()
criterion = nn.CrossEntropyLoss(ignore_index=PAD)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(corpus, batch_size=8, shuffle=True, collate_fn=collate)
losses = []
for x, y in loader:
    logits = model(x)
    loss = criterion(logits.view(-1, logits.size(-1)), y.view(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
