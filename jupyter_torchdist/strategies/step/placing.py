"""Finds the dimension of the samples in a model's inputs: the first, or another one if the first is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..core.scatter import BatchShard, cut_rows, map_tensors

Dims = tuple[int | None, ...]
"""For each input tensor the dimension of its samples; None for tensors that all samples share."""


def in_front(tensors: Sequence[torch.Tensor], total: int) -> Dims:
    """Dimension 0 for every tensor with ``total`` samples there."""
    return tuple(0 if _has(tensor, 0, total) else None for tensor in tensors)


def elsewhere(tensors: Sequence[torch.Tensor], total: int) -> list[Dims]:
    """Other candidates: another dimension of some tensors (hidden states), the dimension after time in all tensors, or
    in the first tensor only (beside a time × time mask)."""
    front = in_front(tensors, total)
    found = [tuple(_only(tensor, total) if dim is None else dim for tensor, dim in zip(tensors, front, strict=True))]
    first = next((one for one in tensors if one.dim() > 1 and not isinstance(one, nn.Parameter)), None)
    if first is not None:
        behind = first.size(1)
        found.append(tuple(next((dim for dim in (1, 0) if _has(tensor, dim, behind)), None) for tensor in tensors))
        found.append(tuple(1 if tensor is first else None for tensor in tensors))
    return [dims for place, dims in enumerate(found) if dims not in (front, *found[:place])]


def samples_in(tensors: Sequence[torch.Tensor], dims: Dims) -> int:
    """The number of samples, from the first tensor with samples."""
    return next(tensor.size(dim) for tensor, dim in zip(tensors, dims, strict=True) if dim is not None)


def cut(values: Any, rows: BatchShard, dims: Dims) -> Any:
    """``values`` with each tensor cut to this rank's rows."""
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
    """The only dimension after the first of size ``samples``; None if there is not exactly one."""
    found = [dim for dim in range(1, tensor.dim()) if _has(tensor, dim, samples)]
    return found[0] if len(found) == 1 else None
