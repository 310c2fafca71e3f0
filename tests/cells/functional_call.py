import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
params = dict(model.named_parameters())


def compute_loss(params, x, y):
    logits = functional_call(model, params, (x,))
    return F.cross_entropy(logits, y)


losses = []
for x, y in DataLoader(TensorDataset(torch.randn(40, 6), torch.randint(0, 2, (40,))), batch_size=10):
    optimizer.zero_grad()
    loss = compute_loss(params, x, y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
