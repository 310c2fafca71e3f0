import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
first = {}


def keep_first(module, inputs, output):
    if "relu" not in first:
        first["relu"] = output.detach()


model[1].register_forward_hook(keep_first)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(4):
    rows = slice(16 * step, 16 * step + 16)
    loss = F.cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
extra = first["relu"].sum(1).tolist()
