import torch
import torch.nn as nn
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
        self.choice, self.mean, self.scale = nn.Linear(16, 3), nn.Linear(16, 2), nn.Linear(16, 2)

    def forward(self, state, action):
        h = self.body(state)
        move = Independent(Normal(self.mean(h), nn.functional.softplus(self.scale(h)) + 0.1), 1)
        return move.log_prob(action), self.choice(h), kl_divergence(move.base_dist, Normal(0.0, 1.0)).sum(-1)


model = Policy()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = TensorDataset(torch.randn(32, 4), torch.randn(32, 2), torch.randint(0, 3, (32,)))
losses = []
for state, action, choice in DataLoader(data, batch_size=8, shuffle=True):
    log_prob, logits, kl = model(state, action)
    policy = Categorical(logits=logits)
    loss = -(log_prob + policy.log_prob(choice)).mean() + 0.1 * kl.mean() - 0.01 * policy.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
