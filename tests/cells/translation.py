import math

import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
PAD, BOS, EOS = 0, 1, 2
pairs = [
    (torch.randint(3, 20, (int(source),)), torch.randint(3, 20, (int(target),)))
    for source, target in torch.randint(3, 9, (44, 2))
]


def with_ends(tokens):
    return torch.cat([torch.tensor([BOS]), tokens, torch.tensor([EOS])])


def collate(batch):  # time, batch
    return tuple(
        nn.utils.rnn.pad_sequence([with_ends(pair[side]) for pair in batch], padding_value=PAD) for side in (0, 1)
    )


class Positions(nn.Module):
    def __init__(self, width, most=50):
        super().__init__()
        place = torch.arange(most).unsqueeze(1)
        wave = torch.exp(-torch.arange(0, width, 2) * math.log(10000.0) / width)
        table = torch.zeros(most, width)
        table[:, 0::2], table[:, 1::2] = torch.sin(place * wave), torch.cos(place * wave)
        self.register_buffer("table", table.unsqueeze(1))

    def forward(self, x):
        return x + self.table[: x.size(0)]


class Seq2Seq(nn.Module):
    def __init__(self, words=20, width=16):
        super().__init__()
        self.transformer = nn.Transformer(width, 2, 1, 1, 32, dropout=0.0)
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        self.positions, self.generator, self.scale = Positions(width), nn.Linear(width, words), math.sqrt(width)

    def forward(self, src, tgt, src_mask, tgt_mask, src_padding, tgt_padding):
        src, tgt = self.positions(self.source(src) * self.scale), self.positions(self.target(tgt) * self.scale)
        return self.generator(
            self.transformer(src, tgt, src_mask, tgt_mask, None, src_padding, tgt_padding, src_padding)
        )


model = Seq2Seq()
for parameter in model.parameters():
    if parameter.dim() > 1:
        nn.init.xavier_uniform_(parameter)
criterion = nn.CrossEntropyLoss(ignore_index=PAD)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-4)
losses = []
for epoch in range(2):
    for src, tgt in DataLoader(pairs, batch_size=12, shuffle=True, collate_fn=collate):
        given, wanted = tgt[:-1], tgt[1:]
        src_mask = torch.zeros(len(src), len(src), dtype=torch.bool)
        tgt_mask = nn.Transformer.generate_square_subsequent_mask(len(given)).isinf()
        logits = model(src, given, src_mask, tgt_mask, (src == PAD).T, (given == PAD).T)
        loss = criterion(logits.reshape(-1, logits.size(-1)), wanted.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
