"""Parts of weights, gradients and momenta are written to by hand, along both dimensions, and looked at."""

import copy

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 1))
nn.init.zeros_(model[0].weight.data[:2])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
losses, seen = [], []
x = torch.randn(8, 6)
for step in range(5):
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    model[0].weight.grad[0] = 0  # a unit that is frozen
    model[2].weight.grad[:, :3].mul_(0.5)
    optimizer.step()
    with torch.no_grad():
        weakest = model[0].weight.norm(dim=1).topk(2, largest=False).indices
        model[0].weight[weakest] = 0.01
        model[0].bias[weakest] = 0
        model[2].weight[-1].div_(model[2].weight[-1].norm().clamp(min=1))
        model[2].weight.chunk(2)[0].clamp_(-0.5, 0.5)
        model[4].weight.detach().numpy()[0, 0] = 0.1
    optimizer.state[model[0].weight]["momentum_buffer"][1].zero_()
    losses.append(loss.item())
    seen.append([weakest.tolist(), model[4].bias.abs().max().item(), model[4].weight.min().item()])
    seen.append([model[0].weight[0].sum().item(), model[2].weight.flatten().quantile(0.5).item()])
kept = copy.deepcopy(list(model.parameters()))
with torch.no_grad():
    kept[0][0] = 1
    kept[1].mul_(2)
norms = [one.norm().item() for one in kept]
