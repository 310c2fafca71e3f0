import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(6, 4)
        self.document = nn.Linear(7, 4)

    def forward(self, q, d):
        scores = F.normalize(self.query(q), dim=1) @ F.normalize(self.document(d), dim=1).T
        return F.cross_entropy(scores / 0.2, torch.arange(len(q)))


torch.manual_seed(0)
model = TwoTower()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
losses = []
for q, d in DataLoader(TensorDataset(torch.randn(32, 6), torch.randn(32, 7)), batch_size=8):
    loss = model(q, d)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
