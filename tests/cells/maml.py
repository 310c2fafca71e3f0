import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
meta_opt = torch.optim.SGD(model.parameters(), lr=0.05)
inner_lr = 0.1


def sample_task(k=10):
    amplitude, phase = torch.rand(1) * 4 + 0.1, torch.rand(1) * 3.14
    x = torch.rand(2 * k, 1) * 10 - 5
    y = amplitude * torch.sin(x + phase)
    return (x[:k], y[:k]), (x[k:], y[k:])


losses = []
for meta_step in range(3):
    meta_loss = 0.0
    for task in range(2):
        (xs, ys), (xq, yq) = sample_task()
        fast = dict(model.named_parameters())
        for _ in range(2):
            inner_loss = F.mse_loss(functional_call(model, fast, (xs,)), ys)
            grads = torch.autograd.grad(inner_loss, list(fast.values()), create_graph=True)
            fast = {name: p - inner_lr * g for (name, p), g in zip(fast.items(), grads)}
        meta_loss = meta_loss + F.mse_loss(functional_call(model, fast, (xq,)), yq)
    meta_opt.zero_grad()
    meta_loss.backward()
    meta_opt.step()
    losses.append(meta_loss.item())
    print("meta step", meta_step, "loss", round(meta_loss.item(), 3))
