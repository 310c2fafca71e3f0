import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
ds = TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))
correct = lambda out, y: (out.argmax(1) == y).sum().item()
losses, hits, seen, before = [], [], [], []


def quiet(k):
    for k, (x, y) in enumerate(DataLoader(ds, 8, shuffle=True), k):
        out = model(x); loss = F.cross_entropy(out, y); opt.zero_grad(); loss.backward(); opt.step()
        if k % 3 == 2: hits.append(correct(out, y)); print(k, len(x), loss.item())
        losses.append(loss.item())


def short(k):
    for k, (x, y) in enumerate(DataLoader(ds, 8, shuffle=True), k):
        out = model(x)
        loss = F.cross_entropy(out, y); opt.zero_grad(); loss.backward(); opt.step()
        k % 3 == 2 and hits.append(correct(out, y))
        losses.append(loss.item())


def choosing(k):
    for k, (x, y) in enumerate(DataLoader(ds, 8, shuffle=True), k):
        out = model(x)
        loss = F.cross_entropy(out, y); opt.zero_grad(); loss.backward(); opt.step()
        seen.append(len(y) if k % 3 == 2 else 0)
        hits.extend(correct(out, y) for _ in range(1) if k % 3 == 2)
        losses.append(loss.item())


def early(k):
    for k, (x, y) in enumerate(DataLoader(ds, 8, shuffle=True), k):
        loss = F.cross_entropy(model(x), y)
        if k % 3 == 2: before.append(loss.item())
        opt.zero_grad(); loss.backward(); opt.step()
        losses.append(loss.item())


quiet(0)
short(0)
choosing(0)
early(0)
