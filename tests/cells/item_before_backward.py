import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
best = float("inf")
for step, (x, y) in enumerate(DataLoader(TensorDataset(torch.randn(48, 4), torch.randn(48, 1)), batch_size=8)):
    loss = (model(x) - y).pow(2).mean()
    losses.append(loss.item())
    if loss.item() < best:
        best = loss.item()
        print(f"step {step}: new best {best:.4f}")
    if torch.isnan(loss):
        raise ValueError("diverged")
    opt.zero_grad()
    loss.backward()
    opt.step()
