import numpy as np
import torch
import torch.nn as nn

rng = np.random.default_rng(0)
X = rng.normal(size=(50, 4)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int64")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
loss_fn = nn.CrossEntropyLoss()
batch_size = 16
losses = []
for epoch in range(2):
    perm = rng.permutation(len(X))
    for i in range(0, len(X), batch_size):
        idx = perm[i : i + batch_size]
        xb, yb = torch.from_numpy(X[idx]), torch.from_numpy(Y[idx])
        loss = loss_fn(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
