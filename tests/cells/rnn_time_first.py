import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(2, 10)
        self.out = nn.Linear(10, 1)

    def forward(self, x):  # time, batch, features
        h, _ = self.rnn(x)
        return self.out(h[-1])


model = Forecaster()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(32, 8, 2), torch.randn(32, 1))
losses = []
for x, y in DataLoader(data, batch_size=8, shuffle=True):
    loss = nn.functional.mse_loss(model(x.transpose(0, 1)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
