"""How a cell's training is spread over the ranks: the user's request, checked and completed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .typed import Record

NAMES = ("none", "ddp", "fsdp", "hsdp", "tp", "cp", "pp", "deepspeed", "auto")
"""The values of ``--strategy``; products are joined by ``+``."""

ALONE = ("none", "deepspeed", "auto")
"""Strategies that cannot be part of a product."""

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The dimensions of the mesh of ranks, outermost first: neighbours in the last dimensions communicate most."""

PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class StrategyPlan(Record):
    """The strategy of one job. The product of all degrees is the world size."""

    name: str = "none"
    """The chosen strategy, for example ``fsdp+tp``; for ``auto`` the strategy that it chose."""
    degrees: dict[str, int] = field(default_factory=dict)
    """Ranks along each of ``DIMENSIONS``; a missing dimension has 1."""
    options: dict[str, Any] = field(default_factory=dict)
    """Converted values from ``-O`` and the configuration file, without defaults."""
    precision: str = "fp32"
    compile: bool = False
    activation_checkpointing: bool = False
    grad_accumulation: int = 1
    verify: int = 0
    """How many optimizer steps are compared with one device."""
    checkpoint: str | None = None
    """Directory of the automatic checkpoints."""
    resume: bool = False
    since: float = 0.0
    """Checkpoints that were complete before this time, in seconds since the epoch, are not resumed."""
    notes: tuple[str, ...] = ()
    """The decisions and their reasons, for ``--plan`` and the receipt."""

    def __post_init__(self) -> None:
        for name, value in self.options.items():
            if isinstance(value, list):  # as JSON gives it
                self.options[name] = tuple(value)

    def degree(self, dimension: str) -> int:
        """Ranks along one of ``DIMENSIONS``."""
        return self.degrees.get(dimension, 1)
