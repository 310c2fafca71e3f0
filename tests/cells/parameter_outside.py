import torch
import torch.nn as nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.basis = nn.Parameter(torch.randn(4, 8))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.head(x @ self.basis)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(3):
    x = torch.randn(8, 4)
    loss = model(x).square().mean() + (x[:, :4] @ model.basis).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss = model.head[0](x @ model.basis).mean()
    losses.append(loss.item())
