import copy

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
target, slow = copy.deepcopy(model), copy.deepcopy(model)
x, y = torch.randn(40, 6), torch.randn(40, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
losses = []
for step in range(6):
    with torch.no_grad():
        want = y + 0.5 * target(x) + 0.1 * slow(x)
    loss = nn.functional.mse_loss(model(x), want)
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
    for p, t, s in zip(model.parameters(), target.parameters(), slow.parameters()):
        t.data.copy_(0.3 * p.data + 0.7 * t.data)
        s.data = 0.9 * s.data + 0.1 * p.data
    with torch.no_grad():
        for p, t in zip(model.parameters(), target.parameters()):
            t.lerp_(p, 0.1)
            t[:] = 0.5 * t + 0.5 * p
total = torch.zeros(1)
total += model[2].bias.detach()
print(losses, total.item())
