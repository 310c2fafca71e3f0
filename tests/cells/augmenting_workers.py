import random, torch, torch.nn as nn
from torch.utils.data import DataLoader, Dataset
class Augmented(Dataset):
    def __init__(self, x, y, train=True): self.x, self.y, self.train = x, y, train
    def __len__(self): return len(self.x)
    def __getitem__(self, i):
        img = self.x[i]
        if self.train:
            if torch.rand(1) < 0.5: img = img.flip(-1)
            dy, dx = torch.randint(0, 3, (2,)).tolist()
            img = nn.functional.pad(img, (1, 1, 1, 1))[:, dy:dy + 8, dx:dx + 8]
            img = img + 0.1 * torch.randn_like(img)
        return img, self.y[i]
g = torch.Generator().manual_seed(0)
X, Y = torch.randn(64, 1, 8, 8, generator=g), torch.randint(0, 4, (64,), generator=g)

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
opt, criterion, losses = torch.optim.SGD(model.parameters(), lr=0.05), nn.CrossEntropyLoss(), []
for epoch in range(2):
    for x, y in DataLoader(Augmented(X, Y), batch_size=16, shuffle=True, num_workers=2):
        loss = criterion(model(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
        losses.append(loss.item())
