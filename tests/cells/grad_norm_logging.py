import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
loader = DataLoader(TensorDataset(torch.randn(40, 6), torch.randint(0, 2, (40,))), batch_size=10, shuffle=True)
losses, grad_norms, weight_norms = [], [], []
for step, (x, y) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    total_norm = 0.0
    for p in model.parameters():
        param_norm = p.grad.detach().data.norm(2)
        total_norm += param_norm.item() ** 2
    total_norm = total_norm**0.5
    optimizer.step()
    losses.append(loss.item())
    grad_norms.append(total_norm)
    weight_norms.append(model[0].weight.norm().item())
    print(f"{step}: loss {loss.item():.4f} |g| {total_norm:.4f} |w| {model[0].weight.abs().mean():.4f}")
