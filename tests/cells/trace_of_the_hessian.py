import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)

model = nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x, y = torch.randn(40, 5), torch.randn(40, 1)
losses, traces = [], []
for _ in range(4):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward(create_graph=True)
    gradients = [p.grad for p in model.parameters()]
    signs = [torch.randint(0, 2, p.shape) * 2.0 - 1 for p in model.parameters()]
    products = torch.autograd.grad(gradients, list(model.parameters()), grad_outputs=signs)
    traces.append(sum((one * other).sum().item() for one, other in zip(signs, products)))
    for p in model.parameters():
        p.grad = p.grad.detach()
    optimizer.step()
    losses.append(loss.item())
