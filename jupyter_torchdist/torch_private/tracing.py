"""Whether ``torch.compile`` makes a graph in this thread."""

from __future__ import annotations

import torch


def is_tracing() -> bool:
    """Whether a graph is being made: its gradients are traced, with tensors that have no values."""
    return torch._guards.TracingContext.try_get() is not None
