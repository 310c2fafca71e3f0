"""What the ranks agree on while they save and load: over a Gloo group of checkpoints alone.

A group of their own, because an asynchronous save communicates in a thread beside the training's collectives, and
because what is agreed on are Python objects: they cross over the CPU, on GPUs too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch.distributed as dist

from ..protocol.errors import CheckpointError, TorchDistError

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """An exception of one rank, in a form that every rank can read."""

    rank: int
    message: str
    hint: str

    @staticmethod
    def of(error: BaseException, rank: int) -> Failure:
        if isinstance(error, TorchDistError):
            return Failure(rank, error.message, error.hint)
        return Failure(rank, f"{type(error).__name__}: {error}", "")

    def error(self) -> CheckpointError:
        return CheckpointError(f"rank {self.rank}: {self.message}", self.hint)


@dataclass(frozen=True)
class Ranks:
    """All ranks of the job; one process without a group is rank 0 of 1."""

    number: int
    size: int
    group: dist.ProcessGroup | None

    @property
    def first(self) -> bool:
        return self.number == 0

    def gather(self, value: T) -> list[T]:
        """``value`` of every rank, in order, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_to_first(self, value: T) -> list[T]:
        """``value`` of every rank on rank 0, nothing on the others."""
        if self.group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.first else None
        dist.gather_object(value, values, dst=dist.get_global_rank(self.group, 0), group=self.group)
        return values or []

    def together(self, act: Callable[[], T]) -> list[T]:
        """``act()`` of every rank. When it raises on one, every rank raises: that rank its own error, the others
        a ``CheckpointError`` with the text of the lowest that failed."""
        own: BaseException | None = None
        outcome: T | Failure
        try:
            outcome = act()
        except Exception as error:  # noqa: BLE001  # raised below, when the others have heard of it
            own, outcome = error, Failure.of(error, self.number)
        outcomes = self.gather(outcome)
        if own is not None:
            raise own
        for other in outcomes:
            if isinstance(other, Failure):
                raise other.error()
        return cast("list[T]", outcomes)

    def by_first(self, act: Callable[[], T]) -> T:
        """What ``act()`` gives or raises on rank 0, on every rank; the others do not call it."""
        own: BaseException | None = None
        outcome: list[Any] = [None]
        if self.first:
            try:
                outcome = [act()]
            except Exception as error:  # noqa: BLE001  # raised below, when the others have heard of it
                own, outcome = error, [Failure.of(error, 0)]
        if self.group is not None:
            dist.broadcast_object_list(outcome, src=dist.get_global_rank(self.group, 0), group=self.group)
        if own is not None:
            raise own
        if isinstance(outcome[0], Failure):
            raise outcome[0].error()
        return cast("T", outcome[0])


_known: tuple[object, Ranks] | None = None


def all_ranks() -> Ranks:
    """The ranks of the default process group. Its first call must be on every rank, as it makes the group."""
    global _known
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks(0, 1, None)
    world = dist.group.WORLD
    if _known is None or _known[0] is not world:
        _known = world, Ranks(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo"))
    return _known[1]


def apart(ranks: Ranks) -> Ranks:
    """The same ranks over a group of its own, for words that pass while a save is under way. On every rank."""
    return ranks if ranks.group is None else replace(ranks, group=dist.new_group(backend="gloo"))
