"""Tensors that may be sharded: what lies here, all of it, and who computes with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from ...protocol.errors import StrategyError
from ...torch_private.dtensors import dispatcher
from .scatter import map_tensors, tensors_in

Handler = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
"""``handler(operation, args, kwargs)``: what DTensor asks in place of what it would do."""


def local(tensor: Tensor) -> Tensor:
    """What this rank has of it: the memory itself, no part of the autograd graph."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of it on every rank; all ranks call it when it is sharded."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full


def divided_as(full: Tensor, tensor: DTensor) -> DTensor:
    """``full``, the same on all ranks, as ``tensor`` is sharded: without a word to other ranks."""
    placements = [Replicate() if one.is_partial() else one for one in tensor.placements]
    return distribute_tensor(full.detach(), tensor.device_mesh, placements, src_data_rank=None)


def fill(tensor: DTensor, full: Tensor) -> None:
    """Write ``full``, which is the same on all ranks, to the shards of ``tensor``.

    Raises ``StrategyError`` where the ranks have summands of it: each would get the whole.
    """
    if any(one.is_partial() for one in tensor.placements):
        raise StrategyError(
            "a part of a tensor is changed in place, and the tensor is a sum whose terms are on several ranks",
            "change a copy (tensor + 0), or use --strategy ddp",
        )
    with torch.no_grad():
        tensor._local_tensor.copy_(divided_as(full, tensor)._local_tensor)


_OWN: dict[Any, Any] = dict(dispatcher()._custom_op_handlers)
"""PyTorch's."""


def as_ever(operation: Any, args: Sequence[Any], kwargs: dict[str, Any], ours: Handler) -> Any:
    """What DTensor itself does, within ``ours``, which is asked in its place."""
    handlers = dispatcher()._custom_op_handlers
    asked = handlers.pop(operation, ours)  # another thread (a save) may be here, too
    if operation in _OWN:
        handlers[operation] = _OWN[operation]
    try:
        return operation(*args, **kwargs)
    finally:
        handlers[operation] = asked


def in_full(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an operation gives for whole tensors, the same on all ranks, beside those that were given."""
    mesh = next(one for one in tensors_in((args, kwargs)) if isinstance(one, DTensor)).device_mesh
    args, kwargs = map_tensors((args, kwargs), whole)
    replicated = [Replicate()] * mesh.ndim
    made = operation(*args, **kwargs)
    return map_tensors(made, lambda full: DTensor.from_local(full, mesh, replicated, run_check=False))


def write_in_full(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operation that writes to its first argument, with whole tensors; a handler, too."""
    written = args[0]
    others, named = map_tensors((args[1:], kwargs), whole)
    if not isinstance(written, DTensor):
        return operation(written, *others, **named)
    full = whole(written).detach().clone()
    operation(full, *others, **named)
    fill(written, full)
    return written
