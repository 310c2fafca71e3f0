import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class TabularDataset(Dataset):
    def __init__(self, categories, numbers, target):
        self.categories, self.numbers, self.target = categories, numbers, target

    def __len__(self):
        return len(self.target)

    def __getitem__(self, idx):
        return {"cat": self.categories[idx], "num": self.numbers[idx], "y": self.target[idx]}


class TabularModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.bn = nn.BatchNorm1d(4)
        self.mlp = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, cat, num):
        return self.mlp(torch.cat([self.emb(cat), self.bn(num)], dim=1)).squeeze(-1)


rng = np.random.RandomState(0)
cat = rng.randint(0, 5, 56)
num = rng.randn(56, 4).astype(np.float32)
target = (num[:, 0] + 0.5 * cat > 1).astype(np.float32)
torch.manual_seed(0)
train_dl = DataLoader(TabularDataset(cat[:40], num[:40], target[:40]), batch_size=10, shuffle=True)
valid_dl = DataLoader(TabularDataset(cat[40:], num[40:], target[40:]), batch_size=16)
model = TabularModel()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
losses = []
for epoch in range(2):
    model.train()
    epoch_losses = []
    for batch in train_dl:
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch["cat"], batch["num"]), batch["y"])
        loss.backward()
        optimizer.step()
        epoch_losses.append(loss.item())
    losses.extend(epoch_losses)
    model.eval()
    preds = np.concatenate(
        [torch.sigmoid(model(b["cat"], b["num"])).detach().cpu().numpy() for b in valid_dl]
    )
    accuracy = np.mean(target[40:] == (preds > 0.5))
    print(f"Epoch {epoch}: train loss {np.mean(epoch_losses):.4f}, valid accuracy {accuracy:.3f}")
