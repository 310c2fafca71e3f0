"""The explicit way, as user code calls it: ``td.prepare`` and ``td.reduce_mean``.

In one plain process, without a job, both give back what they were given.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..protocol.errors import StrategyError
from .core import rank_context

if TYPE_CHECKING:
    from .prepared import Prepared


def prepare(*things: Any) -> Any:
    """Make models, optimizers, ``DataLoader``s and schedulers distributed, in place; all ranks call it alike.

    Any number in any order; returned in that order, one alone. Models get the job's ``--strategy`` (``ddp`` where none
    was given), with its options, ``--precision``, ``--compile`` and ``--activation-checkpointing``. Optimizers built
    before or after train the distributed parameters, schedulers go with them. A loader's ``batch_size`` stays that of
    the whole job: each rank loads its rows of every batch, on ``td.device``. A loss is the mean over this rank's rows
    (``td.reduce_mean`` gives that of the batch); the gradients are those of the whole batch, of uneven ones too. With
    ``-O loss=sum`` losses are sums.

    Raises ``StrategyError`` before anything is changed: a thing of another kind or prepared before, a model without
    parameters or not the same on all ranks, an optimizer of parameters that are of no prepared model.
    """
    if not things:
        raise TypeError("td.prepare takes at least one model, optimizer, DataLoader or scheduler")
    mine = rank_context.current
    if mine is not None:
        if mine.prepared is None:
            mine.prepared = _begun(mine)
        mine.prepared.take(things)
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise StrategyError(
            "td.prepare in ranks that were not started by torchdist: they would train apart from each other",
            "start them with %%distribute, @distributed, or torchdist run SCRIPT",
        )
    return things[0] if len(things) == 1 else things


def _begun(mine: rank_context.Part) -> Prepared:
    from .prepared import Prepared

    if mine.automatic is not None:
        mine.automatic.stand_aside("td.prepare is called, and --strategy acts through it")
        mine.automatic = None
    return Prepared(mine.setting, mine.patience)


def reduce_mean(value: Any) -> Any:
    """The mean over the data ranks, the same on all; they all call it. A tensor gives a tensor, a number a float.

    In a loop over a prepared loader each rank counts with its samples of the batch, so that the ranks' mean losses give
    that of the whole batch. A list or tuple, of microbatches, is averaged first. Gradients do not flow through it.
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


def _weights(mine: rank_context.Part) -> tuple[float | None, Any]:
    """What this rank's value counts with, None for as much as any other's, and the group of data ranks."""
    if not mine.has_mesh:
        return None, None
    if mine.prepared is not None:
        return mine.prepared.weight(), mine.setting.data_group
    return (None if mine.automatic is None else mine.automatic.weight()), mine.setting.data_group
