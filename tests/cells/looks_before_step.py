import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(48, 6), torch.randint(3, (48,))
model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses, right, norms = [], 0.0, []
for inputs, labels in DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True):
    loss = F.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    right += (model(inputs).argmax(-1) == labels).float().mean().item()  # nobody said no_grad
    optimizer.step()
    model(inputs)
    norms.append(sum(p.grad.norm().item() for p in model.parameters() if p.grad is not None))
    losses.append(loss.item())
