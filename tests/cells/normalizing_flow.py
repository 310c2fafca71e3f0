import torch
import torch.nn as nn
from torch.utils.data import DataLoader

torch.manual_seed(0)


class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, dim=1)
        s = torch.tanh(s)
        b = b * s.exp() + t
        return torch.cat([b, a] if self.flip else [a, b], dim=1), s.sum(1)


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Coupling(False), Coupling(True), Coupling(False)])
        self.prior = torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))

    def forward(self, x):
        log_det = torch.zeros(len(x))
        for layer in self.layers:
            x, ld = layer(x)
            log_det = log_det + ld
        return self.prior.log_prob(x), log_det


model = Flow()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for x in DataLoader(torch.randn(40, 2) * torch.tensor([2.0, 0.5]) + 1, batch_size=10, shuffle=True):
    log_prob, log_det = model(x)
    loss = -(log_prob + log_det).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
