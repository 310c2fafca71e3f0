"""The explicit way, as user code calls it: ``td.prepare``. In a plain single process it returns its arguments."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..protocol.errors import StrategyError
from .core import rank_context

if TYPE_CHECKING:
    from .prepared import ExplicitWay


def prepare(*things: Any) -> Any:
    """Make models, optimizers, data loaders and schedulers distributed, in place. All ranks make the same call.

    Takes any number in any order and returns them in that order; one argument is returned as it is. Models get the
    job's ``--strategy`` (default ``ddp``) and its options, ``--precision``, ``--compile``,
    ``--activation-checkpointing``. Optimizers built before or after train the distributed parameters; schedulers follow
    them. A loader's ``batch_size`` stays the global one: each rank loads its rows of every batch, on ``td.device``. A
    loss is the mean over this rank's rows; ``td.reduce_mean`` gives the mean over the batch. Gradients are the ones of
    the global batch, also of an uneven one. With ``-O loss=sum`` losses are sums.

    Raises ``StrategyError`` before anything is changed: for an object of another kind or prepared before, a model
    without parameters or different between ranks, an optimizer with parameters that are in no prepared model.
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


def _begun(mine: rank_context.RankContext) -> ExplicitWay:
    from .prepared import ExplicitWay

    if mine.automatic is not None:
        mine.automatic.stand_aside("td.prepare is called, and --strategy acts through it")
        mine.automatic = None
    return ExplicitWay(mine.context, mine.patience)
