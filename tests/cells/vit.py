import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class ViT(nn.Module):
    def __init__(self, patch=4, dim=16, depth=2, classes=3):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, patch, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, 5, dim) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 32, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


model = ViT()
no_decay = [p for n, p in model.named_parameters() if p.ndim < 2]
decay = [p for n, p in model.named_parameters() if p.ndim >= 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}], lr=1e-3, eps=1e-4
)
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
losses, correct, seen = [], 0, 0
for x, y in DataLoader(TensorDataset(torch.randn(40, 1, 8, 8), torch.randint(0, 3, (40,))), batch_size=10):
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    warmup.step()
    losses.append(loss.item())
    correct += (logits.argmax(-1) == y).sum().item()
    seen += y.size(0)
    print(f"lr {warmup.get_last_lr()[0]:.2e} loss {loss.item():.4f} acc {100 * correct / seen:.1f}%")
