import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        x = torch.tensor([i / 40.0])
        return x, x**2


def seed_worker(worker_id):
    torch.manual_seed(torch.initial_seed() % 2**32)


torch.manual_seed(0)
g = torch.Generator()
g.manual_seed(0)
loader = DataLoader(
    Squares(), batch_size=10, shuffle=True, num_workers=2, worker_init_fn=seed_worker, generator=g
)
model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for x, y in loader:
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
