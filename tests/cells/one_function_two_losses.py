import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,))), batch_size=8, shuffle=True)


def uniformity(z, y):
    z = F.normalize(z, dim=1)
    return (z @ z.T).exp().mean()


def fit(model, optimizer, loss_fn, epochs):
    history = []
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            history.append(loss.item())
    return history


model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = fit(model, optimizer, F.cross_entropy, 2)
losses += fit(model, optimizer, uniformity, 1)
losses += fit(model, optimizer, nn.CrossEntropyLoss(reduction="sum"), 1)
losses += fit(model, optimizer, lambda z, y: F.cross_entropy(z, y, reduction="sum") / 8, 1)
