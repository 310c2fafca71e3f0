import torch
import torch.nn as nn
from torch.utils.data import DataLoader

torch.manual_seed(0)


class SparseAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(10, 20)
        self.decoder = nn.Linear(20, 10)

    def forward(self, x):
        self.code = torch.sigmoid(self.encoder(x))
        return self.decoder(self.code)


model = SparseAutoencoder()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
rho = torch.tensor(0.1)
losses = []
for x in DataLoader(torch.randn(48, 10), batch_size=12, shuffle=True):
    out = model(x)
    rho_hat = model.code.mean(dim=0)
    kl = (rho * (rho / rho_hat).log() + (1 - rho) * ((1 - rho) / (1 - rho_hat)).log()).sum()
    loss = nn.functional.mse_loss(out, x) + 0.1 * kl
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
