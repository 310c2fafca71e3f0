import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
emb, clf = nn.Embedding(30, 8), nn.Linear(8, 2)  # two models, one optimizer
pretrained = torch.randn(20, 8)
with torch.no_grad():
    emb.weight[:20] = pretrained
mask = torch.zeros(30, 1)
mask[20:] = 1.0
handle = emb.weight.register_hook(lambda g: g * mask)
docs = torch.randint(0, 30, (72, 5))
labels = (docs >= 20).any(1).long()
opt = torch.optim.SGD([*emb.parameters(), *clf.parameters()], lr=0.5)
before = copy.deepcopy(emb.state_dict())
losses, fixed = [], []
for epoch in range(2):
    for d, label in DataLoader(TensorDataset(docs, labels), batch_size=8, shuffle=True):
        loss = nn.functional.cross_entropy(clf(emb(d).mean(1)), label)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    fixed.append(torch.equal(emb.weight[:20], pretrained))
    handle.remove()
close = [torch.allclose(p, before[name], atol=1e-3) for name, p in emb.named_parameters()]
print(losses[-1], fixed, close)
