"""``td.reduce_mean``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .core import rank_context


def reduce_mean(value: Any) -> Any:
    """The mean over the data ranks, the same on all. All must call it. A tensor gives a tensor, a number a float.

    In a loop over a prepared loader each rank is weighted by its samples, so mean losses give the mean loss of the
    global batch. A list or tuple (of microbatches) is averaged first. Gradients do not flow through it.
    """
    import torch

    if isinstance(value, (list, tuple)):
        value = _mean_of(value)
    is_tensor = isinstance(value, torch.Tensor)
    mine = rank_context.current
    weights, group = (None, None) if mine is None else _weights(mine)
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return value.detach() if is_tensor else float(value)
    ranks = torch.distributed.get_world_size(group)
    device = mine.device if mine is not None else torch.device("cpu")
    whole = value.detach() if is_tensor else torch.tensor(float(value), dtype=torch.float64, device=device)
    whole = whole * (1.0 / ranks if weights is None else weights)
    torch.distributed.all_reduce(whole, group=group)
    return whole if is_tensor else float(whole)


def _mean_of(values: Sequence[Any]) -> Any:
    if not values:
        raise ValueError("reduce_mean of an empty list")
    return sum(values[1:], values[0]) / len(values)


def _weights(mine: rank_context.RankContext) -> tuple[float | None, Any]:
    """The weight of this rank's value (None: all ranks have the same) and the group of data ranks."""
    if not mine.has_mesh:
        return None, None
    if mine.prepared is not None:
        return mine.prepared.weight(), mine.context.data_group
    return (None if mine.automatic is None else mine.automatic.weight()), mine.context.data_group
