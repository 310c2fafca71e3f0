import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
xs = torch.linspace(-1, 1, 64).unsqueeze(1)
ys = xs.pow(3) + 0.3 * xs

net = model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
loss_fn = nn.MSELoss(reduction="sum")
opt = torch.optim.SGD(net.parameters(), lr=1e-3)

losses = []
for t in range(4):
    for xb, yb in DataLoader(TensorDataset(xs, ys), batch_size=16, shuffle=True):
        y_pred = net(xb)
        loss = loss_fn(y_pred, yb)
        if t % 2 == 0:
            print(t, loss.item())
        losses.append(loss.item())
        net.zero_grad()
        loss.backward()
        opt.step()
