"""A classifier of sequences: an encoder, the mean over its tokens, momentum, a schedule."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1)


class EncoderLayer(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 24), nn.Linear(24, width)
        self.head_width = width // heads

    def split(self, x):
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def forward(self, x):
        y = self.norm1(x)
        y = F.scaled_dot_product_attention(self.split(self.query(y)), self.split(self.key(y)), self.split(self.value(y)))
        x = x + self.output(y.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 16)
        self.layers = nn.Sequential(*[EncoderLayer() for _ in range(2)])
        self.classify = nn.Linear(16, 3)

    def forward(self, signal):
        return self.classify(self.layers(self.embed(signal)).mean(1))


signals, labels = torch.randn(24, 6, 5), torch.randint(3, (24,))
model = Encoder()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
losses = []
for step in range(5):
    optimizer.zero_grad()
    loss = criterion(model(signals), labels)
    loss.backward()
    optimizer.step()
    scheduler.step()
    losses.append(loss.item())
with torch.no_grad():
    accuracy = (model(signals).argmax(-1) == labels).float().mean().item()
