"""Hooks and a model count their calls and note a norm of weights: once a step, whatever a strategy tries before."""

import torch
from torch import nn

torch.manual_seed(0)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.calls, self.history = 0, []

    def forward(self, x):
        self.calls += 1
        self.history.append(self.calls)
        return self.fc(x).tanh()


model = nn.Sequential(Counting(), nn.Linear(6, 1))
notes, counts, steps = [], {"calls": 0}, 0


def count(module, inputs, output):
    global steps
    steps += 1
    counts["calls"] += 1
    notes.append(tuple(output.shape[1:]))


model[0].register_forward_hook(count)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(4):
    loss = model(torch.randn(8, 6)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
calls, history = model[0].calls, list(model[0].history)
