import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(48, 6), torch.randint(3, (48,))
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
losses = []


def loss_of_one(weights, sample, label):
    return F.cross_entropy(functional_call(model, weights, (sample[None],)), label[None])


for inputs, labels in loader:
    weights = {name: p.detach() for name, p in model.named_parameters()}
    each = vmap(grad(loss_of_one), (None, 0, 0))(weights, inputs, labels)
    norms = sum(g.flatten(1).pow(2).sum(1) for g in each.values()).sqrt()
    factors = (0.5 / norms).clamp(max=1.0)  # as private training clips them
    for name, p in model.named_parameters():
        p.grad = torch.einsum("i,i...->...", factors, each[name]) / len(inputs)
    optimizer.step()
    losses.append(F.cross_entropy(model(inputs), labels).item())
