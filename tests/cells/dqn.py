import random
from collections import deque

import torch
import torch.nn as nn

random.seed(0)
torch.manual_seed(0)
policy_net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
target_net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
target_net.load_state_dict(policy_net.state_dict())
optimizer = torch.optim.SGD(policy_net.parameters(), lr=0.1)
memory = deque(maxlen=100)
epsilon, gamma, batch_size = 0.3, 0.9, 8


def select_action(state):
    if random.random() < epsilon:
        return random.randrange(2)
    with torch.no_grad():
        return policy_net(state.unsqueeze(0)).max(1).indices.item()


state = torch.randn(3)
losses = []
for t in range(16):
    action = select_action(state)
    next_state = 0.9 * state + (0.1 if action else -0.1) + 0.1 * torch.randn(3)
    reward = -float(next_state.norm())
    memory.append((state, action, reward, next_state))
    state = next_state
    if len(memory) < batch_size:
        continue
    batch = random.sample(list(memory), batch_size)
    states = torch.stack([b[0] for b in batch])
    actions = torch.tensor([b[1] for b in batch]).unsqueeze(1)
    rewards = torch.tensor([b[2] for b in batch])
    next_states = torch.stack([b[3] for b in batch])
    q = policy_net(states).gather(1, actions).squeeze(1)
    with torch.no_grad():
        expected = rewards + gamma * target_net(next_states).max(1).values
    loss = nn.functional.smooth_l1_loss(q, expected)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if t % 4 == 0:
        target_net.load_state_dict(policy_net.state_dict())
model = policy_net
