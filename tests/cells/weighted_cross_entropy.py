import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Imbalanced(Dataset):
    def __init__(self, n=60):
        g = torch.Generator().manual_seed(3)
        self.labels = (torch.rand(n, generator=g) < 0.2).long()
        self.features = torch.randn(n, 5, generator=g) + self.labels[:, None]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.features[i], self.labels[i]


class Trainer:
    def __init__(self, model, dataset, lr=0.1):
        self.model = model
        self.loader = DataLoader(dataset, batch_size=20, shuffle=True)
        counts = torch.bincount(dataset.labels, minlength=2).float()
        self.weight = counts.sum() / (2 * counts)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        self.history = []

    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y, weight=self.weight)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def fit(self, epochs):
        for _ in range(epochs):
            for x, y in self.loader:
                self.history.append(self.step(x, y))
        return self


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
trainer = Trainer(model, Imbalanced()).fit(epochs=2)
losses = trainer.history
