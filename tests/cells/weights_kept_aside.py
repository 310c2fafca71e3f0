import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

torch.manual_seed(0)

model = nn.Sequential(nn.Linear(6, 70), nn.Tanh(), nn.Linear(70, 3))
theta = parameters_to_vector(model.parameters()).detach().clone()
vector_to_parameters(theta, model.parameters())
first = model[0].weight.data
row = model[2].weight.data[1]
kept = model.state_dict()
optimizer = torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-3)
x, y = torch.randn(32, 6), torch.randint(3, (32,))
losses, norms = [], []
for step in range(6):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    norms.append(theta.norm().item())
    first.mul_(0.9)
    row[2:] += 0.1
    if step == 3:
        theta.clamp_(-0.2, 0.2)
    print(kept["2.weight"].abs().sum().item(), first.mean().item())
best = kept["0.weight"].clone()
moved = (theta - best.mean()).abs().sum().item()
