"""Which dimension of a model's inputs has the samples: the first, or, where that proves wrong, another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..core.scatter import BatchShard, cut_rows, map_tensors

Dims = tuple[int | None, ...]
"""For each tensor of the inputs the dimension of its samples; None for what is the same for all of them."""


def in_front(tensors: Sequence[torch.Tensor], total: int) -> Dims:
    """Where ``total`` samples are in the first dimension."""
    return tuple(0 if _has(tensor, 0, total) else None for tensor in tensors)


def elsewhere(tensors: Sequence[torch.Tensor], total: int) -> list[Dims]:
    """Where else they may be: in another dimension of some tensors (hidden states), behind time in all of them, or in
    the first of them alone (beside a mask of time by time)."""
    front = in_front(tensors, total)
    found = [tuple(_only(tensor, total) if dim is None else dim for tensor, dim in zip(tensors, front, strict=True))]
    first = next((one for one in tensors if one.dim() > 1 and not isinstance(one, nn.Parameter)), None)
    if first is not None:
        behind = first.size(1)
        found.append(tuple(next((dim for dim in (1, 0) if _has(tensor, dim, behind)), None) for tensor in tensors))
        found.append(tuple(1 if tensor is first else None for tensor in tensors))
    return [dims for place, dims in enumerate(found) if dims not in (front, *found[:place])]


def samples_in(tensors: Sequence[torch.Tensor], dims: Dims) -> int:
    """How many samples there are, by the first tensor that has any."""
    return next(tensor.size(dim) for tensor, dim in zip(tensors, dims, strict=True) if dim is not None)


def cut(values: Any, rows: BatchShard, dims: Dims) -> Any:
    """``values`` with this rank's part of each tensor."""
    dim = iter(dims)
    return map_tensors(values, lambda one: one if (where := next(dim)) is None else cut_rows(one, rows, where))


def narrowed(values: Any, dims: Dims, low: int, high: int) -> Any:
    """``values`` with copies of the samples from ``low`` to ``high``, detached."""
    dim = iter(dims)

    def part(tensor: torch.Tensor) -> torch.Tensor:
        where = next(dim)
        return tensor.detach() if where is None else tensor.detach().narrow(where, low, high - low).clone()

    return map_tensors(values, part)


def _has(tensor: torch.Tensor, dim: int, samples: int) -> bool:
    return tensor.dim() > dim and tensor.size(dim) == samples and not isinstance(tensor, nn.Parameter)


def _only(tensor: torch.Tensor, samples: int) -> int | None:
    """The one dimension behind the first that has as many."""
    found = [dim for dim in range(1, tensor.dim()) if _has(tensor, dim, samples)]
    return found[0] if len(found) == 1 else None
