import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
g = torch.Generator().manual_seed(0)
X, Y = torch.randn(60, 6, generator=g), torch.randint(0, 3, (60,), generator=g)
feats, acts = {}, []

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 15), nn.ReLU(), nn.Linear(15, 3))
def keep(name):
    def hook(module, inputs, output): feats[name] = output
    return hook
model[1].register_forward_hook(keep("relu"))
model[0].register_forward_hook(lambda m, i, o: acts.append(o.detach().cpu()))
opt, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
for epoch in range(2):
    for x, y in DataLoader(TensorDataset(X, Y), batch_size=20, shuffle=True):
        loss = F.cross_entropy(model(x), y) + 0.1 * feats["relu"].abs().mean()
        opt.zero_grad(); loss.backward(); opt.step()
        losses.append(loss.item())
extra = [a.sum().item() for a in acts] + [len(a) for a in acts]
