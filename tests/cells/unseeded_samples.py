import numpy as np
import torch
import torch.nn as nn

rng = np.random.default_rng()
X = torch.from_numpy(rng.normal(size=(32, 4))).float()
y = X.sum(1, keepdim=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(4):
    batch = rng.permutation(32)[:8]
    loss = nn.functional.mse_loss(model(X[batch]), y[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
