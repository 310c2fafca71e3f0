import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
activation = {}


def get_activation(name):
    def hook(model, input, output):
        activation[name] = output.detach()

    return hook


model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2))
handle = model[1].register_forward_hook(get_activation("relu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
losses, sparsity = [], []
for x, y in DataLoader(TensorDataset(torch.randn(40, 6), torch.randint(0, 2, (40,))), batch_size=10, shuffle=True):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    sparsity.append((activation["relu"] == 0).float().mean().item())
handle.remove()
