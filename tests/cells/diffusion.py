import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

torch.manual_seed(0)
T = 20
betas = torch.linspace(1e-4, 0.2, T)
alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(T, 8)
        self.net = nn.Sequential(nn.Linear(2 + 8, 24), nn.SiLU(), nn.Linear(24, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], dim=-1))


def q_sample(x0, t, noise):
    a = alphas_cumprod[t].unsqueeze(-1)
    return a.sqrt() * x0 + (1 - a).sqrt() * noise


model = Denoiser()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step, x0 in enumerate(DataLoader(torch.randn(64, 2) * 0.3 + 1, batch_size=16, shuffle=True)):
    t = torch.randint(0, T, (x0.shape[0],)).long()
    noise = torch.randn_like(x0)
    loss = F.mse_loss(model(q_sample(x0, t, noise), t), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
