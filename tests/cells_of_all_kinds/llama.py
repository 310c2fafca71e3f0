"""A Llama in small: rotations that the model passes into its blocks, RMS norms, gated layers, grouped heads."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(2)
WIDTH, HEADS, KEY_HEADS, HEAD, WORDS = 32, 4, 2, 8, 40


def rotate(x, rotation):
    cos, sin = rotation
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.o = nn.Linear(WIDTH, HEADS * HEAD, bias=False), nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False) for _ in range(2))
        self.gate, self.up = nn.Linear(WIDTH, 48, bias=False), nn.Linear(WIDTH, 48, bias=False)
        self.down = nn.Linear(48, WIDTH, bias=False)

    def forward(self, x, rotation):
        y = self.before(x)
        q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q(y), self.k(y), self.v(y)))
        mixed = F.scaled_dot_product_attention(
            rotate(q, rotation), rotate(k, rotation), v, is_causal=True, enable_gqa=True
        )
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        angles = torch.outer(places, 100.0 ** (-torch.arange(0, HEAD, 2, device=tokens.device) / HEAD)).repeat(1, 2)
        rotation = angles.cos(), angles.sin()
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, rotation)
        return self.head(self.norm(x))


data = TensorDataset(torch.randint(WORDS, (24, 13)))
model = Llama()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
losses = []
for (tokens,) in DataLoader(data, batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(3)):
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, WORDS), tokens[:, 1:].reshape(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
