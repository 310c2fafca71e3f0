"""Torchmetrics and Ignite in a rank: where each rank has the values of the whole batch, nothing is summed over ranks.

Seen in torchmetrics 1.9: ``Metric.sync`` gathers the states of all ranks before ``compute``. Seen in Ignite 0.5: the
modules of ``ignite.metrics`` do so with their global ``idist``, if its ``get_world_size()`` is more than 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...strategies.core import rank_context
from ..afterimport import Change
from .base import TrainerRank, wrap


def changes(_rank: TrainerRank) -> dict[str, Change]:
    return {"torchmetrics.metric": _torchmetrics, "ignite.metrics": _ignite}


def _is_alike() -> bool:
    """Whether every rank computes what a single device would compute."""
    part = rank_context.current
    return part is not None and part.automatic is not None


def _torchmetrics(metric: ModuleType) -> None:
    def sync(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        if not _is_alike():
            original(self, *args, **kwargs)

    wrap(metric.Metric, "sync", sync)


def _ignite(metrics: ModuleType) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith(metrics.__name__) and hasattr(module, "idist"):
            vars(module)["idist"] = _Distributed(module.idist)


def _as_it_is(value: Any, *_args: Any, **_options: Any) -> Any:
    return value


_OF_ONE: dict[str, Callable[..., Any]] = {
    "get_world_size": lambda: 1,
    "get_rank": lambda: 0,
    **dict.fromkeys(("all_reduce", "all_gather", "broadcast"), _as_it_is),
}
"""What ``ignite.distributed`` does in a world of one rank."""


class _Distributed:
    """``ignite.distributed`` for metrics: where ranks are alike, a world of one rank."""

    def __init__(self, idist: Any) -> None:
        self._idist = idist

    def __getattr__(self, name: str) -> Any:
        own = _OF_ONE.get(name) if _is_alike() else None
        return own or getattr(self._idist, name)
