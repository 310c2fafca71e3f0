import torch
import torch.nn as nn
from torch.distributions import Categorical


class Corridor:
    """Walk right to the goal."""

    def __init__(self, length=5):
        self.length = length

    def reset(self):
        self.position, self.steps = 2, 0
        return self.observe()

    def observe(self):
        return torch.nn.functional.one_hot(torch.tensor(self.position), self.length + 1).float()

    def step(self, action):
        self.position += 1 if action == 1 else -1
        self.steps += 1
        done = self.position in (0, self.length) or self.steps >= 12
        return self.observe(), (1.0 if self.position == self.length else -0.1), done


torch.manual_seed(0)
env = Corridor()
policy = model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
gamma = 0.95
losses, returns_per_episode = [], []
for episode in range(5):
    state, done = env.reset(), False
    log_probs, rewards = [], []
    while not done:
        dist = Categorical(logits=policy(state.unsqueeze(0)))
        action = dist.sample()
        log_probs.append(dist.log_prob(action))
        state, reward, done = env.step(action.item())
        rewards.append(reward)
    R, returns = 0.0, []
    for r in reversed(rewards):
        R = r + gamma * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    policy_loss = torch.cat([-lp * g for lp, g in zip(log_probs, returns)]).sum()
    optimizer.zero_grad()
    policy_loss.backward()
    optimizer.step()
    losses.append(policy_loss.item())
    returns_per_episode.append(sum(rewards))
