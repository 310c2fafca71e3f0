import torch
import torch.nn as nn

torch.manual_seed(0)
x = torch.linspace(-2, 2, 40)[:, None]
y = torch.sin(2 * x)
model = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5)
loss_fn = nn.MSELoss()
losses = []


def closure():
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    return loss


for i in range(3):
    loss = optimizer.step(closure)
    losses.append(loss.item())
    print(i, loss.item())
