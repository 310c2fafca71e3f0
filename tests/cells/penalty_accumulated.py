import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(48, 6), torch.randint(3, (48,))
model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
losses, scores, sizes = [], [], []
for epoch in range(2):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)  # anew, after a forward with a graph
    for number, (inputs, labels) in enumerate(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)):
        loss = F.cross_entropy(model(inputs), labels) / 2
        loss = loss + 1e-3 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        losses.append(loss.item())
        if number % 2:
            optimizer.step()
            for p in model.parameters():
                p.grad = None
    scores.append(F.cross_entropy(model(x), y).item())
    sizes.append(sum(copy.deepcopy(p).abs().sum().item() for p in model.parameters()))
