import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
shared = nn.Linear(6, 12)


class Actor(nn.Module):
    def __init__(self, trunk):
        super().__init__()
        self.trunk = trunk
        self.pi = nn.Linear(12, 3)

    def forward(self, s):
        return self.pi(torch.tanh(self.trunk(s)))


class Critic(nn.Module):
    def __init__(self, trunk):
        super().__init__()
        self.trunk = trunk
        self.v = nn.Linear(12, 1)

    def forward(self, s):
        return self.v(torch.tanh(self.trunk(s))).squeeze(-1)


actor, critic = Actor(shared), Critic(shared)
uniq = list({id(p): p for m in (actor, critic) for p in m.parameters()}.values())
opt = torch.optim.RMSprop(uniq, lr=5e-3)
losses = []
S = torch.randn(80, 6)
A = torch.randint(0, 3, (80,))
R = (A == S[:, :3].argmax(1)).float()
for epoch in range(2):
    for s, a, r in DataLoader(TensorDataset(S, A, R), batch_size=8, shuffle=True):
        logp = actor(s).log_softmax(-1)
        v = critic(s)
        adv = (r - v).detach()
        pg = -(logp.gather(1, a[:, None]).squeeze(1) * adv).mean()
        vf = (r - v).pow(2).mean()
        ent = -(logp.exp() * logp).sum(-1).mean()
        loss = pg + 0.5 * vf - 0.01 * ent
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    print(f"pg {pg.item():.4f} vf {vf.item():.4f} ent {ent.item():.4f}")
model = nn.ModuleList([actor, critic])
print("same trunk:", actor.trunk.weight is critic.trunk.weight, len(uniq))
