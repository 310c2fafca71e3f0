"""Small models of the kinds that people train, each with a global batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES = 8


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width, bias=False)  # a bias of keys has no gradient: Adam amplifies noise
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU())
        self.back = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention(self.norm(x)).unsqueeze(1).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        return x + self.back(self.mlp(x))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    def __init__(self, tied: bool = True, layers: int = 3, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, width), nn.Embedding(6, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """Three experts, of which one is asked; a temperature without dimensions; a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)])
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(8, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.last(self.experts[1](self.first(x))) * self.temperature)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    """A model and the global batch of a step."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    targets: Callable[[], Tensor]

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.build()

    def batches(self, steps: int) -> list[tuple[Tensor, Tensor]]:
        torch.manual_seed(17)
        return [(self.inputs(), self.targets()) for _ in range(steps)]


def _numbers() -> Tensor:
    return torch.randn(SAMPLES, 6)


def _classes() -> Tensor:
    return torch.randint(3, (SAMPLES,))


def _words() -> Tensor:
    return torch.randint(11, (SAMPLES, 6))


CASES = {
    "mlp": Case(Mlp, _numbers, _classes),
    "conv": Case(ConvNet, lambda: torch.randn(SAMPLES, 2, 5, 5), _classes),
    "tied": Case(Gpt, _words, _words),
    "untied": Case(lambda: Gpt(tied=False), _words, _words),
    "mixture": Case(Mixture, _numbers, _classes),
}


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor, after: Callable[[], None]
) -> float:
    """One step; ``after`` is called between backward and the optimizer."""
    optimizer.zero_grad()
    loss = loss_of(model(inputs), targets)
    loss.backward()
    after()
    optimizer.step()
    return loss.item()


def alone(case: Case, steps: int, make: MakeOptimizer = adamw) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final state on one device."""
    model = case.model()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    losses = [step(model, optimizer, *batch, after=lambda: None) for batch in case.batches(steps)]
    return losses, model.state_dict()
