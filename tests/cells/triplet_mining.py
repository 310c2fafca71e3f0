import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
labels = torch.arange(32) % 4
points = torch.randn(32, 8) + labels[:, None] * 0.5
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def batch_hard_triplet(emb, y, margin=0.5):
    dist = torch.cdist(emb, emb)
    same = y[:, None] == y[None, :]
    hardest_positive = (dist * same).max(dim=1).values
    hardest_negative = (dist + 1e3 * same).min(dim=1).values
    return torch.relu(hardest_positive - hardest_negative + margin).mean()


losses = []
for epoch in range(2):
    for x, y in DataLoader(TensorDataset(points, labels), batch_size=16, shuffle=True):
        loss = batch_hard_triplet(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
