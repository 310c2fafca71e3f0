import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class ComplexLinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(o, i, dtype=torch.cfloat) * (0.5 / i**0.5))
        self.bias = nn.Parameter(torch.zeros(o, dtype=torch.cfloat))

    def forward(self, x):
        return x @ self.weight.T + self.bias


def mod_relu(z, b=-0.05):
    r = z.abs()
    return torch.relu(r + b) * z / (r + 1e-6)


sig = torch.randn(64, 16)
spec = torch.fft.rfft(sig)  # 9 bins
target = torch.fft.rfft(torch.roll(sig, 1, dims=1))
l1, l2 = ComplexLinear(9, 18), ComplexLinear(18, 9)
opt = torch.optim.Adam(list(l1.parameters()) + list(l2.parameters()), lr=2e-2)
losses = []
for epoch in range(2):
    tot = 0
    for s, t in DataLoader(TensorDataset(spec, target), batch_size=8, shuffle=True):
        pred = l2(mod_relu(l1(s)))
        loss = (pred - t).abs().pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        tot += losses[-1]
    print(f"epoch {epoch} {tot / 8:.4f}")
model = nn.Sequential(l1, l2)
print(f"|W| mean {l1.weight.detach().abs().mean().item():.4f}", l1.weight.grad.dtype)
