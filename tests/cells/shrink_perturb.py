import torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
g = torch.Generator().manual_seed(0)
X, Y = torch.randn(60, 6, generator=g), torch.randint(0, 3, (60,), generator=g)
def make(): return nn.Sequential(nn.Linear(6, 15), nn.ReLU(), nn.Linear(15, 3))

torch.manual_seed(0)
model = make()
opt, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
for epoch in range(3):
    for x, y in DataLoader(TensorDataset(X, Y), batch_size=20, shuffle=True):
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
        losses.append(loss.item())
    fresh = make()
    with torch.no_grad():
        for p, q in zip(model.parameters(), fresh.parameters()): p.mul_(0.6).add_(q, alpha=0.1)
        dead = (model[0].weight.abs().sum(1) < model[0].weight.abs().sum(1).median()).nonzero().flatten()
        model[0].weight[dead[:2]] = 0.05 * torch.randn(2, 6)
        model[2].weight[:, dead[:2]] = 0.0
