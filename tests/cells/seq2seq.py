import random

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

random.seed(0)
torch.manual_seed(0)


class Encoder(nn.Module):
    def __init__(self, vocab, hidden):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)

    def forward(self, src):
        return self.gru(self.embedding(src))


class Decoder(nn.Module):
    def __init__(self, vocab, hidden):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, token, hidden):
        output, hidden = self.gru(self.embedding(token), hidden)
        return self.out(output), hidden


class Seq2Seq(nn.Module):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, src, trg, teacher_forcing_ratio=0.5):
        _, hidden = self.encoder(src)
        token, outputs = trg[:, :1], []
        for t in range(1, trg.size(1)):
            logits, hidden = self.decoder(token, hidden)
            outputs.append(logits)
            token = trg[:, t : t + 1] if random.random() < teacher_forcing_ratio else logits.argmax(-1)
        return torch.cat(outputs, dim=1)


model = Seq2Seq(Encoder(15, 8), Decoder(15, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
criterion = nn.CrossEntropyLoss()
pairs = TensorDataset(torch.randint(0, 15, (24, 6)), torch.randint(0, 15, (24, 5)))
losses = []
for src, trg in DataLoader(pairs, batch_size=6, shuffle=True):
    optimizer.zero_grad()
    output = model(src, trg)
    loss = criterion(output.reshape(-1, 15), trg[:, 1:].reshape(-1))
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
