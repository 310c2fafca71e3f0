import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Subset, TensorDataset

torch.manual_seed(0)
x = torch.randn(60, 4)
y = x.abs().sum(1, keepdim=True)
difficulty = x.norm(dim=1)
order = difficulty.argsort().tolist()
full = TensorDataset(x, y)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
losses = []
for stage, fraction in enumerate([0.3, 0.6, 1.0]):
    subset = Subset(full, order[: int(fraction * len(order))])
    loader = DataLoader(subset, batch_size=15, shuffle=True)
    total = 0.0
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(xb), yb)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(xb)
        losses.append(loss.item())
    print(f"stage {stage}: {len(subset)} samples, loss {total / len(subset):.4f}")
