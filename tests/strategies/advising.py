"""A refused cell with a remedy that its refusal names: an option, another strategy, or an edit of the cell."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .running import CELLS
from .traces import TOLERANCE

PAGES = Path(__file__).parents[2] / "docs" / "refusals"


@dataclass(frozen=True)
class Advice:
    """``words`` are in the message, ``told`` in what it says to do. ``edits``: (old, new) text of the cell."""

    name: str
    text: str
    strategy: str
    words: str
    told: str
    then: str = ""
    """Another strategy; empty for the same one."""
    option: tuple[str, ...] = ()
    edits: tuple[tuple[str, str], ...] = ()
    given: dict[str, Any] = field(default_factory=dict)
    """Options with which the cell is refused."""
    instead: dict[str, Any] = field(default_factory=dict)
    """Options that the remedy replaces."""
    tolerance: float = TOLERANCE
    ranks: int = 2

    @property
    def remedied(self) -> str:
        """The cell as the remedy wants it."""
        text = self.text
        for old, new in self.edits:
            assert old in text, f"{self.name}: {old!r} is not in the cell"
            text = text.replace(old, new)
        return text


def cell(name: str) -> str:
    return (CELLS / f"{name}.py").read_text()


def training(
    model: str, loss: str = "F.mse_loss(model(x), y)", *, before: str = "", then: str = "", x: str = ""
) -> str:
    """A cell of four steps: the expression of the model, and lines before the loop and after each step."""
    inputs = x or "torch.randn(8, 6)"
    return f"""
import torch
from torch import nn
import torch.nn.functional as F
{before}
torch.manual_seed(0)
model = {model}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(4):
    x, y = {inputs}, torch.randn(8, 2)
    loss = {loss}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
{then}
"""


MLP = "nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 2))"

MODEL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 2)
        self.scale = nn.Parameter(torch.ones(12))
        self.seen = []
    def forward(self, x):
        h = torch.tanh(self.first(x)) * self.scale
        {line}
        return self.last(h)
"""


def net(line: str) -> str:
    return MODEL.replace("{line}", line)


BLOCKS = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.num_heads = 2
    def forward(self, x):
        q, k, v = (one(x).unflatten(-1, (2, 4)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), Attention()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(torch.relu(self.up(x)))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layers, self.head = nn.Embedding(11, 8), nn.ModuleList([Block(), Block()]), nn.Linear(8, 2)
    def forward(self, x):
        x = self.words(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).mean(1)
"""
MIXED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 2).double()
    def forward(self, x):
        return self.last(torch.tanh(self.first(x)).double()).float()
"""
TOKENS = "torch.randint(11, (8, 6))"
ODD = "torch.randint(11, (8, 5))"

OWN_NORM = """
class OwnNorm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x)
"""
ENCODER = "nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)"
REENTRANT = """
from torch.utils.checkpoint import checkpoint
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 2)
    def forward(self, x):
        return self.last(checkpoint(self.middle, torch.tanh(self.first(x)), use_reentrant=True))
"""


def rows() -> list[tuple[str, str]]:
    """(message, what to do) of the pages of strategies and parallelisms."""
    found = []
    for page in ("strategies", "parallelisms"):
        for line in (PAGES / f"{page}.md").read_text().splitlines():
            if match := re.fullmatch(r"\| (.+) \| (.+) \|", line):
                found.append((match[1], match[2]))
    return [row for row in found if row[0] not in ("message", "---")]
