"""A policy that returns distributions, and numbers of its own, within an object."""

import torch
import torch.nn as nn
from torch.distributions import Categorical, Independent, Normal


class Output:
    def __init__(self, move, turn, value, width):
        self.move, self.turn, self.value, self.width = move, turn, value, width


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 12), nn.Tanh())
        self.mean, self.turn, self.value = nn.Linear(12, 2), nn.Linear(12, 3), nn.Linear(12, 1)
        self.log_std = nn.Parameter(torch.zeros(2))

    def forward(self, state):
        hidden = self.trunk(state)
        move = Independent(Normal(self.mean(hidden), self.log_std.exp()), 1)
        turn = Categorical(logits=self.turn(hidden))
        assert turn.probs.size(-1) == 3
        return Output(move, turn, self.value(hidden).squeeze(-1), hidden.size(-1))


torch.manual_seed(0)
policy = model = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
losses, entropies = [], []
for step in range(6):
    state, reward = torch.randn(10, 5), torch.randn(10)
    out = policy(state)
    moved, turned = out.move.sample(), out.turn.sample()
    advantage = reward - out.value
    log_prob = out.move.log_prob(moved) + out.turn.log_prob(turned)
    entropy = out.move.entropy() + out.turn.entropy()
    loss = (-log_prob * advantage.detach() + advantage.square() - 0.01 * entropy).mean() / out.width
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    entropies.append(entropy.mean().item())
