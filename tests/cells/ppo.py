import torch
import torch.nn as nn
from torch.distributions import Normal

torch.manual_seed(0)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
        self.critic = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
        self.log_std = nn.Parameter(torch.zeros(1))

    def forward(self, obs):
        return self.actor(obs).squeeze(-1), self.critic(obs).squeeze(-1)


agent = model = ActorCritic()
optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3, eps=1e-5)
clip_coef, ent_coef, vf_coef, max_grad_norm = 0.2, 0.01, 0.5, 0.5
num_steps, minibatch = 32, 16
losses = []
for update in range(2):
    # rollout
    with torch.no_grad():
        obs = torch.randn(num_steps, 3)
        mean, values = agent(obs)
        dist = Normal(mean, agent.log_std.exp())
        actions = dist.sample()
        logprobs = dist.log_prob(actions)
        rewards = -(actions - obs.sum(-1)).pow(2)
        returns = rewards
        advantages = returns - values
    for epoch in range(2):
        indices = torch.randperm(num_steps)
        for start in range(0, num_steps, minibatch):
            mb = indices[start : start + minibatch]
            mean, newvalue = agent(obs[mb])
            dist = Normal(mean, agent.log_std.exp())
            ratio = (dist.log_prob(actions[mb]) - logprobs[mb]).exp()
            adv = advantages[mb]
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - clip_coef, 1 + clip_coef)).mean()
            v_loss = 0.5 * ((newvalue - returns[mb]) ** 2).mean()
            loss = pg_loss - ent_coef * dist.entropy().mean() + vf_coef * v_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), max_grad_norm)
            optimizer.step()
            losses.append(loss.item())
