import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)



class Lookahead:
    def __init__(self, base, k=3, alpha=0.5):
        self.base, self.k, self.alpha, self.n = base, k, alpha, 0
        self.slow = [[p.clone().detach() for p in g["params"]] for g in base.param_groups]

    def zero_grad(self):
        self.base.zero_grad()

    def step(self):
        self.base.step()
        self.n += 1
        if self.n % self.k == 0:
            for g, slow in zip(self.base.param_groups, self.slow):
                for p, q in zip(g["params"], slow):
                    q.add_(p.data - q, alpha=self.alpha)
                    p.data.copy_(q)


model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))
optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3))
losses = []
for x, y in DataLoader(TensorDataset(torch.randn(48, 6), torch.randint(3, (48,))), batch_size=8, shuffle=True):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
