import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head, self.before = nn.Linear(8, 16), nn.Linear(16, 3), None

    def forward(self, x):
        hidden = F.relu(self.encoder(x))
        if self.before is not None and self.before.shape == hidden.shape:
            hidden = hidden + 0.3 * self.before
        return self.head(hidden), hidden


torch.manual_seed(0)
x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(4):
    rows = slice(16 * step, 16 * step + 16)
    output, hidden = model(x[rows])
    loss = F.cross_entropy(output, y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    model.before = hidden.detach()
