import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
epsilon = 0.1
losses = []
robust = 0
for x, y in DataLoader(TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,))), batch_size=10, shuffle=True):
    # fast gradient sign method
    x_adv = x.clone().detach().requires_grad_(True)
    F.cross_entropy(model(x_adv), y).backward()
    x_adv = (x + epsilon * x_adv.grad.sign()).detach()
    optimizer.zero_grad()
    logits = model(x_adv)
    loss = 0.5 * F.cross_entropy(model(x), y) + 0.5 * F.cross_entropy(logits, y)
    loss.backward()
    optimizer.step()
    robust += (logits.argmax(1) == y).sum().item()
    losses.append(loss.item())
accuracy = robust / 40
