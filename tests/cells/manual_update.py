import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x_train, y_train = torch.randn(48, 5), torch.randint(0, 3, (48,))
bs, lr = 12, 0.3


class Logistic(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(5, 3) / 5**0.5)
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, xb):
        return xb @ self.weights + self.bias


model = Logistic()
loss_func = nn.functional.cross_entropy
losses = []


def fit():
    for epoch in range(2):
        for xb, yb in DataLoader(TensorDataset(x_train, y_train), batch_size=bs):
            loss = loss_func(model(xb), yb)
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= p.grad * lr
                model.zero_grad()
            losses.append(loss.item())


fit()
print(loss_func(model(x_train), y_train).item())
