import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
labelled = DataLoader(TensorDataset(torch.randn(48, 6), torch.randint(3, (48,))), batch_size=8, shuffle=True)
unlabelled = DataLoader(TensorDataset(torch.randn(96, 6)), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses, more = [], iter(unlabelled)


def distance():
    return model(next(more)[0]).square().mean()


for epoch in range(2):
    for x, y in labelled:
        loss = F.cross_entropy(model(x), y)
        if epoch == 1:
            loss = loss + 0.3 * distance()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
