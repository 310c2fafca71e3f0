import os
import tempfile

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(60, 4)
y = (x[:, 0] * x[:, 1] > 0).long()
train_loader = DataLoader(TensorDataset(x[:40], y[:40]), batch_size=20, shuffle=True)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
checkpoints = tempfile.TemporaryDirectory()
path = os.path.join(checkpoints.name, "best.pt")

losses, best_acc, patience, epoch = [], 0.0, 2, 0
while patience > 0 and epoch < 6:
    model.train()
    for xb, yb in train_loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        acc = (model(x[40:]).argmax(1) == y[40:]).float().mean().item()
    if acc > best_acc:
        best_acc = acc
        torch.save(model.state_dict(), path)
    else:
        patience -= 1
    epoch += 1
    print(f"epoch {epoch} accuracy {acc:.3f} best {best_acc:.3f}")
model.load_state_dict(torch.load(path))
checkpoints.cleanup()
