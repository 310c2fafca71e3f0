"""Layers that learn the size of their inputs in their first forward (``nn.LazyLinear`` …)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy


def materialise(forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Materialise lazy layers before ``module`` is tried and divided. Parameters get their usual random values."""
    if not any(is_lazy(one) for one in (*module.parameters(), *module.buffers())):
        return
    modes = [(part, part.training) for part in module.modules()]
    try:
        for part, _ in modes:
            part.training = False  # no statistics, no dropout
        with torch.no_grad():
            forward(*args, **kwargs)
    finally:
        for part, training in modes:
            part.training = training
