import copy, torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader
class BYOL(nn.Module):
    def __init__(self, net, dim=8, m=0.9):
        super().__init__()
        self.online, self.predictor, self.m = net, nn.Linear(dim, dim), m
        self.target = copy.deepcopy(net)
        for p in self.target.parameters(): p.requires_grad = False
    @torch.no_grad()
    def update(self):
        for q, k in zip(self.online.parameters(), self.target.parameters()): k.data = k.data * self.m + q.data * (1 - self.m)
    def forward(self, a, b):
        self.update()
        p = F.normalize(self.predictor(self.online(a)), dim=1)
        with torch.no_grad(): z = F.normalize(self.target(b), dim=1)
        return 2 - 2 * (p * z).sum(1)
data = torch.randn(48, 10, generator=torch.Generator().manual_seed(0))

torch.manual_seed(0)
model = BYOL(nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 8)))
opt, losses = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), []
for x in DataLoader(data, batch_size=8, shuffle=True):
    loss = model(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)).mean()
    opt.zero_grad(); loss.backward(); opt.step()
    losses.append(loss.item())
