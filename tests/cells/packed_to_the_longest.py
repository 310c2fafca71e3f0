import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
lengths = torch.randint(2, 9, (26,))
signals = torch.randn(26, 10, 3)


class Smoother(nn.Module):
    """Inputs of one length give outputs as long as the longest sequence of the batch: a mean over them counts that."""

    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x, n):
        states, _ = self.rnn(pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False))
        states, _ = pad_packed_sequence(states, batch_first=True)
        return self.out(states)


model = Smoother()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
losses = []
for epoch in range(3):
    for x, n in DataLoader(TensorDataset(signals, lengths), batch_size=7, shuffle=True):
        loss = model(x, n).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
