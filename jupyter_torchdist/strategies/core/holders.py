"""Other holders of a replaced parameter: lists for clipping, averaged copies, variables of the cell."""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping
from types import CellType, FrameType
from typing import Any, TypeVar

from torch import nn

from ...protocol.errors import StrategyError

T = TypeVar("T")


def all_of(kind: type[T]) -> list[T]:
    """Every live object of ``kind``.

    Compares by ``type``: ``isinstance`` would dereference a weak proxy, whose object may be gone (``torch.compile``
    leaves such proxies).
    """
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]


def carry_attributes(replaced: Mapping[Any, Any]) -> None:
    """Give the attributes that the cell has put on parameters (``p.no_decay = True``) to those that replace them."""
    for old, new in replaced.items():
        for name, value in vars(old).items():
            if not name.startswith(("_", "torchdist_")):
                setattr(new, name, value)


def hand_over(
    replaced: Mapping[nn.Parameter, nn.Parameter], known: Collection[Any], *, all_or_nothing: bool = True
) -> None:
    """Put the new parameters in the containers of user code; ``known`` are our own containers, left unchanged.

    Otherwise a stale parameter would silently be clipped, averaged or printed. A tuple cannot be changed:
    ``all_or_nothing`` raises ``StrategyError`` for it.
    """
    new_of = {id(old): new for old, new in replaced.items()}
    old = tuple(replaced)  # Python 3.13 finds the arguments of its own call
    ours = {id(one) for one in (*known, replaced, old)}
    for holder in gc.get_referrers(*old):
        if id(holder) in ours or isinstance(holder, FrameType):
            continue
        if isinstance(holder, list):
            holder[:] = [new_of.get(id(one), one) for one in holder]
        elif isinstance(holder, dict):
            for key, value in list(holder.items()):
                if id(value) in new_of:
                    holder[key] = new_of[id(value)]
        elif isinstance(holder, set):
            stale = [one for one in holder if id(one) in new_of]
            holder.difference_update(stale)
            holder.update(new_of[id(one)] for one in stale)
        elif isinstance(holder, CellType):
            holder.cell_contents = new_of[id(holder.cell_contents)]
        elif isinstance(holder, tuple) and gc.is_tracked(holder) and all_or_nothing:
            raise StrategyError(
                "a tuple of the cell holds parameters that are now sharded: it would keep the old parameters",
                "use a list, or make it after the first training step",
            )
