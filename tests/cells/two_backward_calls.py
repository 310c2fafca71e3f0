import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 12)
        self.age = nn.Linear(12, 1)
        self.group = nn.Linear(12, 3)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return {"age": self.age(h), "group": self.group(h)}


model = TwoHeads()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(40, 6), torch.randn(40, 1), torch.randint(0, 3, (40,)))
losses = []
for x, age, group in DataLoader(data, batch_size=8, shuffle=True):
    optimizer.zero_grad()
    out = model(x)
    age_loss = nn.functional.l1_loss(out["age"], age)
    group_loss = nn.functional.cross_entropy(out["group"], group)
    age_loss.backward(retain_graph=True)
    group_loss.backward()
    optimizer.step()
    losses.append(age_loss.item() + group_loss.item())
