"""DTensor's dispatch."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .settings import release


def dispatcher() -> Any:
    """The object that dispatches every operation on a DTensor. It tries its ``_custom_op_handlers`` first."""
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher


def dtensor_dispatches_subclasses() -> bool:
    """Whether ``__torch_dispatch__`` of a DTensor subclass is called. torch 2.10 and 2.11 skip it (C++ fast path)."""
    return release() not in ((2, 10), (2, 11))


@functools.cache
def aten_operations() -> tuple[Any, ...]:
    """Every overload of torch's own (aten) operators."""
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if not name.startswith("__")]
    return tuple(getattr(one, kind) for one in packets if hasattr(one, "overloads") for kind in one.overloads())


def fill_in_dtensor(handlers: dict[Any, Any]) -> None:
    """Add to ``handlers`` (``_custom_op_handlers``) operators that DTensor lacks: ``detach_`` before torch 2.13."""
    if release() < (2, 13):
        handlers[torch.ops.aten.detach_.default] = _detach_in_place


def _detach_in_place(operation: Any, args: Any, kwargs: Any) -> Any:
    return args[0]  # autograd has detached it already
