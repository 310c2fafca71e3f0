import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []


@torch.compile(backend="aot_eager")
def loss_of(x, y):
    return F.cross_entropy(model(x), y)


for step in range(4):
    rows = slice(16 * step, 16 * step + 16)
    loss = loss_of(x[rows], y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
