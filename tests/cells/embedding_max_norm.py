import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
words, labels = torch.randint(0, 30, (48, 5)), torch.randint(0, 3, (48,))
model = nn.Sequential(nn.Embedding(30, 8, max_norm=2.0), nn.Flatten(), nn.Linear(40, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
losses = []
for epoch in range(2):
    for x, y in DataLoader(TensorDataset(words, labels), batch_size=12, shuffle=True):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
