import torch
import torch.nn as nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(48, 3), torch.randn(48, 1)
train = DataLoader(TensorDataset(x[:32], y[:32]), batch_size=16, shuffle=True)
valid = DataLoader(TensorDataset(x[32:], y[32:]), batch_size=8)
model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
losses, val_losses = [], []
for epoch in range(4):
    model.train()
    for xb, yb in train:
        loss = nn.functional.mse_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        val_loss = sum(nn.functional.mse_loss(model(xb), yb, reduction="sum").item() for xb, yb in valid) / 16
    scheduler.step(val_loss)
    val_losses.append(val_loss)
    print(f"{epoch} val {val_loss:.4f} lr {optimizer.param_groups[0]['lr']:.4g}")
