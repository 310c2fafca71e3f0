import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Spectral(nn.Module):
    def __init__(self, channels, modes):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(channels, channels, modes, dtype=torch.cfloat) / channels)

    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        out = torch.zeros_like(spectrum)
        out[..., : self.modes] = torch.einsum("bik,iok->bok", spectrum[..., : self.modes], self.weight)
        return torch.fft.irfft(out, n=x.size(-1))


class FNO(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.project = nn.Conv1d(1, 8, 1), nn.Conv1d(8, 1, 1)
        self.spectral, self.local = Spectral(8, 5), nn.Conv1d(8, 8, 1)

    def forward(self, x):
        h = self.lift(x)
        return self.project(F.gelu(self.spectral(h) + self.local(h)))


model = FNO()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3)
x = torch.randn(32, 1, 24)
losses = []
for inputs, targets in DataLoader(TensorDataset(x, x.cumsum(2) / 10), batch_size=8):
    loss = F.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
scale = model.spectral.weight.abs().sum().item()
