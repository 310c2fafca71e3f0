import io

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(24, 4), torch.randn(24, 1)), batch_size=8)


def build():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def train(model, optimizer):
    history = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    return history


model, optimizer = build()
losses = train(model, optimizer)
buffer = io.BytesIO()
torch.save({"epoch": 1, "model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}, buffer)
buffer.seek(0)

model, optimizer = build()
checkpoint = torch.load(buffer)
model.load_state_dict(checkpoint["model_state_dict"])
optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
losses += train(model, optimizer)
losses += train(model, optimizer)
