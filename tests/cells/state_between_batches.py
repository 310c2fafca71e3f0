import torch
import torch.nn as nn
import torch.nn.functional as F


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head, self.state = nn.LSTM(1, 12, batch_first=True), nn.Linear(12, 1), None

    def forward(self, x):
        if self.state is None or self.state[0].size(1) != x.size(0):
            self.state = (torch.zeros(1, x.size(0), 12), torch.zeros(1, x.size(0), 12))
        out, state = self.lstm(x, self.state)
        self.state = tuple(part.detach() for part in state)
        return self.head(out)


torch.manual_seed(0)
series = torch.sin(torch.arange(0, 40, 0.1)).view(8, 50, 1)
model = Forecaster()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []
for start in range(0, 40, 10):
    x, y = series[:, start : start + 10], series[:, start + 1 : start + 11]
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
