import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses, sharpness = [], []
for x, y in DataLoader(TensorDataset(torch.randn(48, 6), torch.randint(3, (48,))), batch_size=8, shuffle=True):
    loss = F.cross_entropy(model(x), y)
    params = list(model.parameters())
    named = {name: (parameter, parameter.requires_grad) for name, parameter in model.named_parameters()}
    gradients = torch.autograd.grad(loss, params, create_graph=True)
    along = [torch.ones_like(parameter) for parameter in params]
    curved = torch.autograd.grad(gradients, params, grad_outputs=along)
    sharpness.append(sum(one.sum() for one in curved).item())
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    losses.append(loss.item())
    weights = tuple(model.parameters())
del gradients
