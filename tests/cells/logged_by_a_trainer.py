import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Accuracy:
    def __init__(self):
        self.right, self.seen = 0, 0

    def update(self, out, y):
        self.right += (out.argmax(1) == y).sum().item()
        self.seen += len(y)


class Trainer:
    def __init__(self, model, loader):
        self.model, self.loader = model, loader
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
        self.accuracy, self.losses, self.marks = Accuracy(), [], []
        self.tables = [lambda out, y: None, lambda out, y: None, lambda out, y: self.marks.append(y.sum().item())]

    def train_step(self, k, x, y):
        self.out = self.model(x)
        loss = F.cross_entropy(self.out, y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if k % 3 == 2:
            self.report(y)
        return loss.item()

    def report(self, y):
        self.measure(y)
        print(f"{self.accuracy.right} of {self.accuracy.seen}")

    def measure(self, y):
        self.accuracy.update(self.out, y)

    def fit(self):
        for k, (x, y) in enumerate(self.loader):
            self.losses.append(self.train_step(k, x, y))

    def fit_by_cases(self):
        for k, (x, y) in enumerate(self.loader):
            self.losses.append(self.train_step(0, x, y))
            match k % 3:
                case 2:
                    self.marks.append((self.out.argmax(1) == y).sum().item())
                case _:
                    pass

    def fit_by_table(self):
        for k, (x, y) in enumerate(self.loader):
            self.losses.append(self.train_step(0, x, y))
            self.tables[k % 3](self.out, y)

    def fit_slowly(self):
        for k, (x, y) in enumerate(self.loader):
            self.losses.append(self.train_step(0, x, y))
            yield k, y


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
ds = TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))
trainer = Trainer(model, DataLoader(ds, 8, shuffle=True))
trainer.fit()
trainer.fit_by_cases()
trainer.fit_by_table()
for k, y in trainer.fit_slowly():
    if k % 3 == 2:
        trainer.marks.append(len(y))
losses, marks, right = trainer.losses, trainer.marks, trainer.accuracy.right
