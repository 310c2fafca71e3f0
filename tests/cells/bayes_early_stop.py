import math, torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
class BayesLinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.mu, self.rho = nn.Parameter(torch.empty(o, i).uniform_(-0.2, 0.2)), nn.Parameter(torch.full((o, i), -3.0))
        self.bias, self.kl = nn.Parameter(torch.zeros(o)), 0
    def forward(self, x):
        sigma = torch.log1p(torch.exp(self.rho))
        w = self.mu + sigma * torch.randn_like(sigma)
        self.kl = (torch.distributions.Normal(self.mu, sigma).log_prob(w) - torch.distributions.Normal(0.0, 1.0).log_prob(w)).sum()
        return F.linear(x, w, self.bias)
class BNN(nn.Module):
    def __init__(self): super().__init__(); self.l1, self.l2 = BayesLinear(5, 12), BayesLinear(12, 1)
    def forward(self, x): return self.l2(torch.relu(self.l1(x)))
    def kl(self): return self.l1.kl + self.l2.kl
g = torch.Generator().manual_seed(0)
X, Y = torch.randn(60, 5, generator=g), torch.randn(60, 1, generator=g)

torch.manual_seed(0)
model = BNN()
opt, losses, patience, best = torch.optim.Adam(model.parameters(), lr=3e-2), [], 0, float("inf")
loader = DataLoader(TensorDataset(X, Y), batch_size=15, shuffle=True)
for epoch in range(15):
    total = 0.0
    for x, y in loader:
        pred = model(x)
        loss = F.mse_loss(pred, y, reduction="sum") + model.kl() / len(loader)
        opt.zero_grad(); loss.backward(); opt.step()
        total += loss.item()
        losses.append(loss.item())
    if total < best: best, patience = total, 0
    else: patience += 1
    if patience >= 1: break
