import itertools

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


def styles(rows):
    while True:
        yield from rows


class Styled(nn.Module):
    calls = itertools.count(10, 2)

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)
        self.styles = styles([torch.full((6,), 0.5 + 0.25 * i) for i in range(5)])
        self.scales = [itertools.cycle([1.0, 2.0, 0.5])]
        self.seen = 0

    def forward(self, x):
        self.seen = next(self.calls)
        return self.fc(x * next(self.styles)) * next(self.scales[0])


x, y = torch.randn(64, 6), torch.randint(3, (64,))
model = Styled()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for bx, by in DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True):
    loss = F.cross_entropy(model(bx), by)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
seen, following = model.seen, next(Styled.calls)
del model.styles
print(seen, following, Styled.calls)
