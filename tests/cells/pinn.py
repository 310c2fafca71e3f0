import torch
import torch.nn as nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
t_boundary = torch.tensor([[0.0]]).requires_grad_(True)
t_physics = torch.linspace(0, 1, 30).view(-1, 1).requires_grad_(True)
losses = []
for i in range(5):
    optimizer.zero_grad()
    u = model(t_boundary)
    loss1 = (torch.squeeze(u) - 1) ** 2
    u = model(t_physics)
    dudt = torch.autograd.grad(u, t_physics, torch.ones_like(u), create_graph=True)[0]
    d2udt2 = torch.autograd.grad(dudt, t_physics, torch.ones_like(dudt), create_graph=True)[0]
    loss2 = torch.mean((d2udt2 + 4 * dudt + 9 * u) ** 2)
    loss = loss1 + 1e-2 * loss2
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
