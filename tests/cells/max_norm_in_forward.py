import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
class MaxNormLinear(nn.Linear):
    """EEGNet's layers: rows no longer than max_norm."""
    def __init__(self, *a, max_norm=0.3): super().__init__(*a); self.max_norm = max_norm
    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=self.max_norm)
        return super().forward(x)
g = torch.Generator().manual_seed(0)
X, Y = torch.randn(64, 8, generator=g), torch.randint(0, 3, (64,), generator=g)

torch.manual_seed(0)
model = nn.Sequential(MaxNormLinear(8, 16), nn.ELU(), MaxNormLinear(16, 3))
optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.02), []
for epoch in range(2):
    for x, y in DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(loss.item())
