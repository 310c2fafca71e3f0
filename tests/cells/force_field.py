import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Potential(nn.Module):
    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(9, 16), nn.SiLU(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, positions):
        positions = positions.requires_grad_(True)
        energy = self.energy(positions.flatten(1)).squeeze(-1)
        (gradient,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return energy, -gradient


model = Potential()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
positions = torch.randn(24, 3, 3)
energies, forces = positions.square().sum((1, 2)), -2 * positions
losses = []
for epoch in range(2):
    for x, e, f in DataLoader(TensorDataset(positions, energies, forces), batch_size=8, shuffle=True):
        energy, force = model(x)
        loss = nn.functional.mse_loss(energy, e) + 10 * nn.functional.mse_loss(force, f)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
