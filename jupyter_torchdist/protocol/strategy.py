"""How a cell's training is spread over the ranks: what the user asked for, checked and made whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .typed import Record

NAMES = ("none", "ddp", "fsdp", "hsdp", "tp", "cp", "pp", "deepspeed", "auto")
"""What may stand after ``--strategy``; products are joined by ``+``."""

ALONE = ("none", "deepspeed", "auto")
"""Those that are no part of a product."""

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Of the mesh of ranks, the outermost first: neighbours in the last ones talk most."""

PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class StrategyPlan(Record):
    """One job's strategy, decided. The degrees of all dimensions multiply to the world size."""

    name: str = "none"
    """As asked for, ``fsdp+tp``; what ``auto`` chose, once it has."""
    degrees: dict[str, int] = field(default_factory=dict)
    """Ranks along each of ``DIMENSIONS``; a dimension that is not named has 1."""
    options: dict[str, Any] = field(default_factory=dict)
    """What ``-O`` and the configuration file set, converted; the defaults are not in it."""
    precision: str = "fp32"
    compile: bool = False
    activation_checkpointing: bool = False
    grad_accumulation: int = 1
    checkpoint: str | None = None
    """Directory of the automatic way's checkpoints."""
    resume: bool = False
    notes: tuple[str, ...] = ()
    """What was decided and why, for ``--plan`` and the receipt."""

    def __post_init__(self) -> None:
        for name, value in self.options.items():
            if isinstance(value, list):  # as JSON gives it
                self.options[name] = tuple(value)

    def degree(self, dimension: str) -> int:
        """Ranks along one of ``DIMENSIONS``."""
        return self.degrees.get(dimension, 1)
