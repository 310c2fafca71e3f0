import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
train = DataLoader(TensorDataset(torch.randn(58, 6), torch.randint(3, (58,))), batch_size=8, shuffle=True)
held_out = DataLoader(TensorDataset(torch.randn(21, 6), torch.randint(3, (21,))), batch_size=5)
model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses, scores = [], []


def score():  # with gradients that nobody asks for
    return sum(F.cross_entropy(model(u), v).item() for u, v in held_out)


for epoch in range(2):
    for step, (x, y) in enumerate(train):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if step == 4:
            scores.append(score())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
