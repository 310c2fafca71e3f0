"""Communication between the ranks while they save and load, over a separate Gloo group.

The group is separate because an asynchronous save communicates in a thread, in parallel to the collectives of the
training. It uses Gloo because the ranks exchange Python objects, which are on the CPU.
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
    """An exception of one rank, in a form that can be sent to every rank."""

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
        """``value`` of every rank on rank 0, an empty list on the others."""
        if self.group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.first else None
        dist.gather_object(value, values, dst=dist.get_global_rank(self.group, 0), group=self.group)
        return values or []

    def together(self, act: Callable[[], T]) -> list[T]:
        """The result of ``act()`` of every rank. If it raises on a rank, every rank raises: that rank its own error,
        the others a ``CheckpointError`` with the message of the lowest rank that failed."""
        own: BaseException | None = None
        outcome: T | Failure
        try:
            outcome = act()
        except Exception as error:  # noqa: BLE001  # raised below, after the other ranks know it
            own, outcome = error, Failure.of(error, self.number)
        outcomes = self.gather(outcome)
        if own is not None:
            raise own
        for other in outcomes:
            if isinstance(other, Failure):
                raise other.error()
        return cast("list[T]", outcomes)

    def by_first(self, act: Callable[[], T]) -> T:
        """Call ``act()`` on rank 0 only. Every rank returns or raises its outcome."""
        own: BaseException | None = None
        outcome: list[Any] = [None]
        if self.first:
            try:
                outcome = [act()]
            except Exception as error:  # noqa: BLE001  # raised below, after the other ranks know it
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
    """The ranks of the default process group. All ranks must make the first call, which creates the Gloo group."""
    global _known
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks(0, 1, None)
    world = dist.group.WORLD
    if _known is None or _known[0] is not world:
        _known = world, Ranks(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo"))
    return _known[1]


def apart(ranks: Ranks) -> Ranks:
    """The same ranks over a new group, for communication during a save. Every rank must call it."""
    return ranks if ranks.group is None else replace(ranks, group=dist.new_group(backend="gloo"))
