import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)


class Pairs(Dataset):
    def __init__(self, n=36):
        self.a, self.b = torch.randn(n, 6), torch.randn(n, 6)
        self.same = torch.randint(0, 2, (n,)).float()

    def __len__(self):
        return len(self.same)

    def __getitem__(self, i):
        return (self.a[i], self.b[i]), self.same[i]


class ContrastiveLoss(nn.Module):
    def __init__(self, margin=2.0):
        super().__init__()
        self.margin = margin

    def forward(self, out1, out2, label):
        d = F.pairwise_distance(out1, out2)
        return torch.mean(label * d.pow(2) + (1 - label) * torch.clamp(self.margin - d, min=0.0).pow(2))


model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
criterion = ContrastiveLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
for (a, b), same in DataLoader(Pairs(), batch_size=12, shuffle=True):
    optimizer.zero_grad()
    loss = criterion(model(a), model(b), same)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
