import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(36, 5), torch.randint(0, 3, (36,))
weights = torch.rand(36)
model = nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
losses = []
for epoch in range(2):
    for xb, yb, wb in DataLoader(TensorDataset(x, y, weights), batch_size=9):
        per_sample = F.cross_entropy(model(xb), yb, reduction="none")
        loss = (per_sample * wb).sum() / wb.sum()
        hard = per_sample.topk(3).values.mean()  # the hardest examples count twice
        loss = loss + hard
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
