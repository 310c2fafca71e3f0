import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.correction = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x, missing):
        h = self.fc(x)
        if missing.any():
            h = h + self.correction(missing.float())
        return h


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(32, 4), torch.rand(32, 4) < 0.05, torch.randint(0, 2, (32,)))
losses = []
for x, missing, y in DataLoader(data, batch_size=4, shuffle=True):
    loss = nn.functional.cross_entropy(model(x, missing), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
