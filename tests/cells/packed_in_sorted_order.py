import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

torch.manual_seed(0)
sequences = [torch.randn(n, 3) for n in (9, 7, 5, 4, 3, 6, 2, 8)]


class Sorted(nn.Module):
    """What it returns is in the order of the lengths, which is that of the samples in the first batch by chance."""

    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(3, 5, batch_first=True), nn.Linear(5, 1)

    def forward(self, x, lengths):
        lengths, order = lengths.sort(descending=True)
        _, hidden = self.rnn(pack_padded_sequence(x[order], lengths, batch_first=True))
        return self.out(hidden[-1])


model = Sorted()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for batch in (sequences[:4], sequences[4:]):
    lengths = torch.tensor([len(one) for one in batch])
    loss = (model(pad_sequence(batch, batch_first=True), lengths).squeeze(1) - lengths).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
