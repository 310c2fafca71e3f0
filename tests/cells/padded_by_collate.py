import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

torch.manual_seed(0)
series = sorted((torch.randn(int(n), 3) for n in torch.randint(3, 9, (28,))), key=len)


def pad(batch):
    return pad_sequence(batch, batch_first=True)


class Encoder(nn.Module):
    """Without a mask: what is padded counts, in the last state, in the mean and in the loss."""

    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(3, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        states, _ = self.rnn(x)
        return self.out(states), states[:, -1]


model = Encoder()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
losses = []
for epoch in range(3):
    for x in DataLoader(series, batch_size=7, shuffle=epoch > 0, collate_fn=pad):
        rebuilt, last = model(x)
        loss = F.mse_loss(rebuilt, x) + (last - x.mean(1).repeat(1, 2)).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
