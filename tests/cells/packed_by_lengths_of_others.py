import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence

torch.manual_seed(0)


class Twisted(nn.Module):
    """By mistake each sequence is cut to the length of another one."""

    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x, lengths):
        _, (hidden, _) = self.rnn(pack_padded_sequence(x, lengths.flip(0), batch_first=True))
        return self.out(hidden[-1])


model = Twisted()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(3):
    x, lengths = torch.randn(6, 5, 3), torch.tensor([2, 2, 3, 4, 5, 5])
    loss = F.cross_entropy(model(x, lengths), lengths % 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
