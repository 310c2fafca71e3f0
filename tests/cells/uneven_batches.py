import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
ds = TensorDataset(torch.randn(11, 3), torch.randn(11, 1))
model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses, sizes = [], []
for epoch in range(3):
    for x, y in DataLoader(ds, batch_size=5, shuffle=True):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        sizes.append(len(x))
print("seen", sum(sizes), "samples in batches of", sorted(set(sizes)))
