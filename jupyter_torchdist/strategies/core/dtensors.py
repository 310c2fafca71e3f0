"""Helpers for tensors that may be sharded: the local shard, the full tensor, and operations on full tensors."""

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
"""``handler(operation, args, kwargs)``: DTensor calls it instead of its own dispatch."""


def local(tensor: Tensor) -> Tensor:
    """The local shard on this rank: the memory itself, outside the autograd graph."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The full tensor on every rank; a collective call if ``tensor`` is sharded."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full


def divided_as(full: Tensor, tensor: DTensor) -> DTensor:
    """``full`` (equal on all ranks) with the placements of ``tensor``, without communication."""
    placements = [Replicate() if one.is_partial() else one for one in tensor.placements]
    return distribute_tensor(full.detach(), tensor.device_mesh, placements, src_data_rank=None)


def fill(tensor: DTensor, full: Tensor) -> None:
    """Write ``full``, which is the same on all ranks, to the shards of ``tensor``.

    Raises ``StrategyError`` for a ``Partial`` placement: each rank's summand would become the full value.
    """
    if any(one.is_partial() for one in tensor.placements):
        raise StrategyError(
            "a part of a tensor is changed in place, and the tensor is a sum whose terms are on several ranks",
            "change a copy (tensor + 0), or use --strategy ddp",
        )
    with torch.no_grad():
        tensor._local_tensor.copy_(divided_as(full, tensor)._local_tensor)


_OWN: dict[Any, Any] = dict(dispatcher()._custom_op_handlers)
"""PyTorch's own handlers."""


def as_ever(operation: Any, args: Sequence[Any], kwargs: dict[str, Any], ours: Handler) -> Any:
    """The result of DTensor's own dispatch; called within ``ours``, the handler that replaces it."""
    handlers = dispatcher()._custom_op_handlers
    asked = handlers.pop(operation, ours)  # another thread (a save) may be here, too
    if operation in _OWN:
        handlers[operation] = _OWN[operation]
    try:
        return operation(*args, **kwargs)
    finally:
        handlers[operation] = asked


def in_full(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of an operation on the full tensors, replicated over the mesh of the given ones."""
    mesh = next(one for one in tensors_in((args, kwargs)) if isinstance(one, DTensor)).device_mesh
    args, kwargs = map_tensors((args, kwargs), whole)
    replicated = [Replicate()] * mesh.ndim
    made = operation(*args, **kwargs)
    return map_tensors(made, lambda full: DTensor.from_local(full, mesh, replicated, run_check=False))


def write_in_full(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation that writes to its first argument on full tensors; also usable as a handler."""
    written = args[0]
    others, named = map_tensors((args[1:], kwargs), whole)
    if not isinstance(written, DTensor):
        return operation(written, *others, **named)
    full = whole(written).detach().clone()
    operation(full, *others, **named)
    fill(written, full)
    return written
