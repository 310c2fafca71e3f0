import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3)
        self.fc = nn.Linear(12, 2)

    def forward(self, x):
        x = torch.relu(self.conv(x))
        return self.fc(x.view(64, -1))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for x, y in DataLoader(TensorDataset(torch.randn(192, 1, 8), torch.randint(0, 2, (192,))), batch_size=64):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
