import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(60, 4)
y = x.sum(1, keepdim=True).tanh()
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
shadow = {name: p.data.clone() for name, p in model.named_parameters()}
losses, followed = [], []
for epoch in range(3):
    for bx, by in DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True):
        loss = F.l1_loss(model(bx), by)
        opt.zero_grad()
        loss.backward()
        opt.step()
        for name, p in model.named_parameters():
            shadow[name] = 0.9 * shadow[name] + 0.1 * p.data
    raw = F.l1_loss(model(x), y).item()
    first, last = model[0].weight.data, model[2].bias.detach()
    backup = {}
    for name, p in model.named_parameters():
        backup[name] = p.data
        p.data = shadow[name].clone()
    smooth = F.l1_loss(model(x), y).item()
    for name, p in model.named_parameters():
        p.data = backup[name]
    losses += [raw, smooth, F.l1_loss(model(x), y).item()]
    followed += [first.sum().item(), last.sum().item()]
print(losses, followed)
