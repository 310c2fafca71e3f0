"""Where the loops over a ``DataLoader`` are, and how a later run comes there without running their bodies.

A loader does not know of the loops over it, so iterations are counted where they begin, in ``DataLoader.__iter__``,
for loaders that are followed. A run that is resumed counts its own: iterations that were over give nothing; the one
that was under way begins with the random numbers with which it had begun, so that it shuffles alike, passes over the
batches that were seen (their indices are drawn, their samples are not loaded), and gives the rest.
A first batch that was only looked at, ``next(iter(loader))``, is given again.

Passing over is exact for samples that are loaded in the rank. Workers (``num_workers``) begin the batch at which
they resume with the random numbers of their epoch's beginning; ``replay=True`` loads what was seen again and is exact.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from . import randomness

Loader = DataLoader[Any]


@dataclass(frozen=True)
class Saved:
    """A position, as a checkpoint keeps it."""

    started: int = 0
    """Iterations that have begun."""
    batches: int = 0
    """That the last one has given."""
    live: bool = False
    """Whether it is under way."""
    looks: tuple[int, ...] = ()
    """Iterations of which only the first batch was taken."""
    ranks: int = 1
    """Among which the sampler divides a batch."""
    at_start: dict[str, Any] = field(default_factory=dict)
    """Random numbers with which the last iteration began."""
    generators: list[torch.Tensor] = field(default_factory=list)
    """States of the loader's own generators when it was saved."""

    @property
    def over(self) -> int:
        """Iterations that need not be run again."""
        return self.started - self.live


def _nothing() -> None:
    pass


class Position:
    """One loader's, counted from when it was first followed."""

    def __init__(self, loader: Loader, replay: bool) -> None:
        self.loader = weakref.ref(loader)
        self.replay = replay
        self.started, self.batches, self.live = 0, 0, False
        self.looks: list[int] = []
        self.at_start: dict[str, Any] = {}
        self.goal: Saved | None = None
        self.arrived: Callable[[], None] = _nothing

    def saved(self) -> Saved:
        loader = self._loader()
        states = [generator.get_state() for generator in _generators(loader)]
        looks = tuple(self.looks)
        return Saved(self.started, self.batches, self.live, looks, _ranks_of(loader), self.at_start, states)

    def go_to(self, goal: Saved, arrived: Callable[[], None] = _nothing, epochs: bool = True) -> None:
        """Pass over what ``goal`` has seen, in the iterations that follow.

        ``arrived`` is called when the first batch that was not seen is about to be loaded, and when the last iteration
        that was over has been passed over, as there may be no other: the caller sets everything to what it was then.
        Without ``epochs`` the next iteration is the one that was under way, for loops that begin at the right epoch
        by themselves.
        """
        self.goal, self.arrived = goal, arrived
        self.started = 0 if epochs else goal.over
        self.looks = list(goal.looks)

    def iterate(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The batches of an iteration that begins now."""
        number, goal = self.started, self.goal
        self.started += 1
        if goal is None:
            return self._run(make, 0, number)
        if number < goal.over:
            if number == goal.over - 1 and not goal.live:
                self._arrive(goal)
            return make() if number in goal.looks else iter(())
        self.goal = None
        if not goal.live:
            self._arrive(goal)
            return self._run(make, 0, number)
        return self._run(make, self._seen(goal), number, goal)

    def _run(
        self, make: Callable[[], Iterator[Any]], seen: int, number: int, goal: Saved | None = None
    ) -> Iterator[Any]:
        loader = self._loader()
        now = randomness.capture()
        if goal is not None:
            _set_all(loader, goal.at_start)
        self.at_start = _capture_all(loader)
        iterator = self._make_from(make, seen)
        if goal is not None:
            randomness.restore(now)  # of two loaders that go on together, the second must not undo the first
            self._arrive(goal)
        self.batches, self.live = seen, True
        return self._count(iterator, number)

    def _arrive(self, goal: Saved) -> None:
        for generator, state in zip(_generators(self._loader()), goal.generators, strict=False):
            generator.set_state(state)
        self.arrived()

    def _seen(self, goal: Saved) -> int:
        """Batches to pass over; fewer when more ranks divide each of them."""
        return goal.batches * goal.ranks // _ranks_of(self._loader())

    def _make_from(self, make: Callable[[], Iterator[Any]], seen: int) -> Iterator[Any]:
        loader = self._loader()
        where = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        if not seen:
            return make()
        if self.replay or isinstance(loader.dataset, torch.utils.data.IterableDataset):
            return _replayed(make(), seen)
        # A DataLoader refuses that its samplers are set; it reads them when an iteration begins.
        sampler = _From(loader.__dict__[where], seen)
        loader.__dict__[where] = sampler
        try:
            iterator = make()
        finally:
            loader.__dict__[where] = sampler.whole
        return iterator if sampler.made() else _replayed(iterator, seen)

    def _count(self, iterator: Iterator[Any], number: int) -> Iterator[Any]:
        finished = False
        try:
            for batch in iterator:
                if number == self.started - 1:
                    self.batches += 1
                yield batch
            finished = True
        finally:
            if number == self.started - 1:
                self.live = False
                if not finished and self.batches == 1:
                    self.looks.append(number)

    def _loader(self) -> Loader:
        loader = self.loader()
        assert loader is not None, "a position outlived its loader"
        return loader


def _replayed(batches: Iterator[Any], seen: int) -> Iterator[Any]:
    """Load what was seen, and drop it."""
    for _ in range(seen):
        next(batches, None)
    return batches


class _From:
    """A sampler whose iterators pass over its first items, while an iteration is made; afterwards it is itself again.

    The items are drawn when they are first asked for, as the sampler itself would draw them: after the seed that the
    loader draws for its workers. Persistent workers keep it, and ask it again in their later epochs.
    """

    def __init__(self, whole: Iterable[Any], seen: int) -> None:
        self.whole, self._seen = whole, seen
        self._last: _Rest | None = None
        self._made = False

    def __iter__(self) -> Iterator[Any]:
        if self._made:
            return iter(self.whole)
        self._last = _Rest(iter(self.whole), self._seen)
        return self._last

    def __len__(self) -> int:
        return len(self.whole)  # type: ignore[arg-type]

    def made(self) -> bool:
        """False when nobody has asked: a loader that begins later, or takes its indices from elsewhere."""
        self._made = True
        if self._last is None:
            return False
        self._last.pass_over()
        return True


class _Rest:
    """An iterator without its first ``seen`` items."""

    def __init__(self, items: Iterator[Any], seen: int) -> None:
        self._items, self._seen = items, seen

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.pass_over()
        return next(self._items)

    def pass_over(self) -> None:
        for _ in range(self._seen):
            next(self._items, None)
        self._seen = 0


_positions: weakref.WeakKeyDictionary[Loader, Position] = weakref.WeakKeyDictionary()


def follow(loader: Loader, replay: bool = False) -> Position:
    """Count the iterations over ``loader`` from now on. Again: the same position."""
    watch_iterations()
    position = _positions.get(loader)
    if position is None:
        position = _positions[loader] = Position(loader, replay)
    return position


def position_of(loader: Loader) -> Position | None:
    """That of a loader that is followed."""
    return _positions.get(loader)


def share(loader: Loader, shadow: Loader) -> None:
    """Loops over ``loader``, if it is followed, are those over ``shadow``, which draws its batches from now on."""
    position = _positions.get(loader)
    if position is not None and loader is not shadow:
        position.loader = weakref.ref(shadow)
        _positions[shadow] = position


def hand_on(earlier: Loader, later: Loader) -> None:
    """The iterations over ``later`` continue those over ``earlier``, of the same name."""
    position = follow(earlier)
    position.loader = weakref.ref(later)
    _positions[later] = position
    del _positions[earlier]


@functools.cache
def watch_iterations() -> None:
    """Let ``DataLoader.__iter__`` tell the positions. Whoever wraps it too does so afterwards."""
    original = DataLoader.__iter__

    @functools.wraps(original)
    def __iter__(self: Loader) -> Any:
        position = _positions.get(self)
        return original(self) if position is None else position.iterate(lambda: original(self))

    DataLoader.__iter__ = __iter__  # type: ignore[method-assign]


def _ranks_of(loader: Loader) -> int:
    sampler = loader.sampler
    return sampler.num_replicas if isinstance(sampler, DistributedSampler) else 1


def _generators(loader: Loader) -> list[torch.Generator]:
    """Generators of the loader and its samplers, each once."""
    holders = (loader, loader.sampler, loader.batch_sampler)
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(item): item for item in found if isinstance(item, torch.Generator)}.values())


def _capture_all(loader: Loader) -> dict[str, Any]:
    return {**randomness.capture(), "generators": [item.get_state() for item in _generators(loader)]}


def _set_all(loader: Loader, state: dict[str, Any]) -> None:
    randomness.restore(state)
    for generator, own in zip(_generators(loader), state["generators"], strict=False):
        generator.set_state(own)
