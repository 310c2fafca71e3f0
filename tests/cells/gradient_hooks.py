import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 8)
y = torch.sin(x.sum(1, keepdim=True)) * 3
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)

model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
for parameter in model.parameters():  # clipped by value, as gradients come
    parameter.register_hook(lambda grad: grad.clamp(-0.02, 0.02))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
losses = []
for epoch in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
