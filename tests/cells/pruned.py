import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.nn.utils.prune as prune
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)

model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))
prune.l1_unstructured(model[0], "weight", 0.3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
losses = []
for epoch in range(2):
    for x, y in DataLoader(TensorDataset(torch.randn(48, 6), torch.randint(3, (48,))), batch_size=8, shuffle=True):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
zeros = int((model[0].weight == 0).sum())
prune.remove(model[0], "weight")
