import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
trunk = nn.Sequential(nn.Linear(6, 12), nn.Tanh())
heads = nn.ModuleList([nn.Linear(12, 1), nn.Linear(12, 3)])
model = nn.ModuleList([trunk, heads])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(50, 6)
data = TensorDataset(x, x.sum(1, keepdim=True), torch.randint(0, 3, (50,)))
losses, cosines, norms, shared = [], [], [], None
for epoch in range(2):
    for xb, ya, yb in DataLoader(data, batch_size=9, shuffle=True):
        h = trunk(xb)
        la, lb = F.mse_loss(heads[0](h), ya), F.cross_entropy(heads[1](h), yb)
        if shared is None or epoch:
            shared = list(trunk.parameters())  # between forward and backward; sometimes those of steps ago
        optimizer.zero_grad()
        la.backward(retain_graph=True)
        ga = [p.grad.clone() for p in shared]
        for p in shared:
            p.grad = None
        lb.backward(retain_graph=True)
        gb = [p.grad.clone() for p in shared]
        dot = sum((a * b).sum() for a, b in zip(ga, gb))
        if dot < 0:  # PCGrad: each without what contradicts the other
            na, nb = sum(a.pow(2).sum() for a in ga), sum(b.pow(2).sum() for b in gb)
            ga, gb = [a - dot / nb * b for a, b in zip(ga, gb)], [b - dot / na * a for a, b in zip(ga, gb)]
        for p, a, b in zip(shared, ga, gb):
            p.grad = a + b
        norms.append(nn.utils.clip_grad_norm_(shared, 0.5).item())
        optimizer.step()
        with torch.no_grad():
            for p in shared:
                p.clamp_(-0.35, 0.35)
        losses.append((la + lb).item())
        cosines.append(dot.item())
