import numpy as np, torch, torch.nn as nn
from torch.utils.data import DataLoader, Dataset
class Words(Dataset):
    def __init__(self, x): self.x, self.rng = x, np.random.default_rng(3)
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i].roll(int(self.rng.integers(5)))
g = torch.Generator().manual_seed(0)
X = torch.randint(1, 20, (64, 6), generator=g)

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
opt, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
for epoch in range(2):
    for x in DataLoader(Words(X), batch_size=16, shuffle=True):
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        opt.zero_grad(); loss.backward(); opt.step()
        losses.append(loss.item())
