"""Which loop runs: a place in the code, a loader, and the objects that the place works with.

Never by ``id``: a new loader may get the ``id`` of a deleted one, on one rank but not on another. Ranks that confuse
different loops deadlock.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader

T = TypeVar("T")


@dataclass(frozen=True)
class LoopSite:
    """``instruction`` of ``code``, with the callables, modules, optimizers and flags that its names refer to.

    ``fit(model, loader, contrastive)`` and ``fit(model, loader, cross_entropy)`` are different loops.
    """

    code: CodeType
    instruction: int
    works_with: dict[str, Any]

    @staticmethod
    def of(frame: FrameType) -> LoopSite:
        """Where a frame of user code is. At a module's top level only the place counts: the names are global."""
        names = {} if frame.f_locals is frame.f_globals else dict(frame.f_locals)
        trainer = names.get("self")
        if trainer is not None and not isinstance(trainer, torch.nn.Module):
            names |= {f"self.{name}": value for name, value in getattr(trainer, "__dict__", {}).items()}
        known = {name: known for name, value in names.items() if (known := _known(value)) is not _OTHER}
        return LoopSite(frame.f_code, frame.f_lasti, known)

    def same(self, other: LoopSite) -> bool:
        if (self.code, self.instruction) != (other.code, other.instruction):
            return False
        mine, others = self.works_with, other.works_with
        return mine.keys() == others.keys() and all(_is(value, others[name]) for name, value in mine.items())


class ByLoop(Generic[T]):
    """Results by loop. They are dropped when their loaders are deleted."""

    def __init__(self) -> None:
        self._found: weakref.WeakKeyDictionary[DataLoader[Any], list[tuple[LoopSite, T]]] = weakref.WeakKeyDictionary()

    def __contains__(self, loop: tuple[DataLoader[Any], LoopSite]) -> bool:
        return self._entry(*loop) is not None

    def get(self, loop: tuple[DataLoader[Any], LoopSite]) -> T | None:
        """The result of a loop; None also if there is none."""
        entry = self._entry(*loop)
        return None if entry is None else entry[1]

    def __setitem__(self, loop: tuple[DataLoader[Any], LoopSite], found: T) -> None:
        loader, place = loop
        others = [entry for entry in self._found.get(loader, ()) if not entry[0].same(place)]
        self._found[loader] = [*others, (place, found)]

    def _entry(self, loader: DataLoader[Any], place: LoopSite) -> tuple[LoopSite, T] | None:
        return next((entry for entry in self._found.get(loader, ()) if entry[0].same(place)), None)


_OTHER = object()
"""Stands for values that do not identify a loop: counters, tensors, lists."""


def _known(value: Any) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if not (callable(value) or isinstance(value, torch.optim.Optimizer)):
        return _OTHER
    try:
        return weakref.ref(value)
    except TypeError:
        return _OTHER


def _is(one: Any, other: Any) -> bool:
    if isinstance(one, weakref.ref) and isinstance(other, weakref.ref):
        return one() is not None and one() is other()
    return type(one) is type(other) and bool(one == other)
