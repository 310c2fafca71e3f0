"""Compilation of each repeated block, in place, before it is sharded.

A block is compiled once for all its siblings, and the collectives of FSDP stay between compiled regions. See
https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html (``compile``).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from . import activations
from .base import Setting


def check(model: nn.Module, setting: Setting) -> None:
    """Whatever cannot be compiled runs as it is: nothing to refuse."""


def apply(model: nn.Module, setting: Setting, **options: Any) -> None:
    """Compile the repeated blocks, or the whole model where there are none; ``options`` are those of torch.compile.

    A model without blocks must not be sharded afterwards: its collectives would be inside.
    """
    for block in activations.of(model, setting) or [model]:
        block.compile(**options)
