import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class MatrixFactorization(nn.Module):
    def __init__(self, n_users, n_items, k=4):
        super().__init__()
        self.user, self.item = nn.Embedding(n_users, k), nn.Embedding(n_items, k)
        self.user_bias, self.item_bias = nn.Embedding(n_users, 1), nn.Embedding(n_items, 1)
        self.mean = nn.Parameter(torch.tensor(3.0))

    def forward(self, u, i):
        dot = (self.user(u) * self.item(i)).sum(1)
        return dot + self.user_bias(u).squeeze(1) + self.item_bias(i).squeeze(1) + self.mean


ratings = TensorDataset(torch.randint(0, 9, (60,)), torch.randint(0, 7, (60,)), torch.randint(1, 6, (60,)).float())
model = MatrixFactorization(9, 7)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
losses = []
for epoch in range(2):
    sse = 0
    for u, i, r in DataLoader(ratings, batch_size=20, shuffle=True):
        loss = nn.functional.mse_loss(model(u, i), r)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sse += loss.item() * len(r)
        losses.append(loss.item())
    print(f"epoch {epoch} rmse {(sse / len(ratings)) ** 0.5:.4f}")
