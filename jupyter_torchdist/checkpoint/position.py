"""The positions of loops over a ``DataLoader``, and how a later run gets there without running their bodies.

A loader does not know the loops over it. So iterations over followed loaders are counted where they begin, in
``DataLoader.__iter__``. A resumed run counts, too. An iteration that was finished at saving yields nothing. The
iteration that was running begins with the same random state, so that it shuffles in the same order. It skips the
batches that were seen (their indices are drawn, their samples are not loaded), and yields the rest.
If only the first batch of an iteration was taken, ``next(iter(loader))``, that batch is yielded again.

Skipping is exact for samples that are loaded in the rank's process. Workers (``num_workers``) resume with the random
state of the beginning of their epoch. ``replay=True`` loads the seen batches again and is exact.
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
    """A position in a checkpoint."""

    started: int = 0
    """Iterations that have begun."""
    batches: int = 0
    """Batches that the last iteration has yielded."""
    live: bool = False
    """Whether the last iteration is not finished."""
    looks: tuple[int, ...] = ()
    """Iterations of which only the first batch was taken."""
    ranks: int = 1
    """Number of ranks among which the sampler divides a batch."""
    at_start: dict[str, Any] = field(default_factory=dict)
    """Random states with which the last iteration began."""
    generators: list[torch.Tensor] = field(default_factory=list)
    """States of the loader's own generators at saving."""

    @property
    def over(self) -> int:
        """Number of iterations that are finished."""
        return self.started - self.live


def _nothing() -> None:
    pass


class Position:
    """The position in one loader, counted from when it was first followed."""

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
        """In the next iterations, skip the batches that ``goal`` has seen.

        ``arrived`` is called before the first unseen batch is loaded, or, if no iteration was running, when the last
        finished iteration is skipped (there may be no further one). The caller then restores its state.
        Without ``epochs``, the next iteration is the one that was running: use this for loops that begin at the right
        epoch themselves.
        """
        self.goal, self.arrived = goal, arrived
        self.started = 0 if epochs else goal.over
        self.looks = list(goal.looks)

    def iterate(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin an iteration; returns its batches."""
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
            randomness.restore(now)  # when two loaders resume together, the second must not undo the first
            self._arrive(goal)
        self.batches, self.live = seen, True
        return self._count(iterator, number)

    def _arrive(self, goal: Saved) -> None:
        for generator, state in zip(_generators(self._loader()), goal.generators, strict=False):
            generator.set_state(state)
        self.arrived()

    def _seen(self, goal: Saved) -> int:
        """Number of batches to skip; fewer if more ranks divide each batch now."""
        return goal.batches * goal.ranks // _ranks_of(self._loader())

    def _make_from(self, make: Callable[[], Iterator[Any]], seen: int) -> Iterator[Any]:
        loader = self._loader()
        where = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        if not seen:
            return make()
        if self.replay or isinstance(loader.dataset, torch.utils.data.IterableDataset):
            return _replayed(make(), seen)
        # A DataLoader does not allow to set its samplers. It reads them when an iteration begins.
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
    """Load the seen batches and drop them."""
    for _ in range(seen):
        next(batches, None)
    return batches


class _From:
    """A sampler whose iterators skip the first items while an iteration is created; later they skip nothing.

    The items are drawn at the first request, like the sampler itself would do: after the loader has drawn the seed for
    its workers. Persistent workers keep this sampler and use it again in later epochs.
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
        """End the skipping. False if no iterator was requested: the loader starts later, or has other indices."""
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
    """Count the iterations over ``loader`` from now on. A second call returns the same position."""
    watch_iterations()
    position = _positions.get(loader)
    if position is None:
        position = _positions[loader] = Position(loader, replay)
    return position


def position_of(loader: Loader) -> Position | None:
    """The position in a loader; None if the loader is not followed."""
    return _positions.get(loader)


def share(loader: Loader, shadow: Loader) -> None:
    """If ``loader`` is followed, share its position with ``shadow``, which draws its batches from now on."""
    position = _positions.get(loader)
    if position is not None and loader is not shadow:
        position.loader = weakref.ref(shadow)
        _positions[shadow] = position


def hand_on(earlier: Loader, later: Loader) -> None:
    """Move the position from ``earlier`` to ``later``, a loader with the same name: its iterations continue."""
    position = follow(earlier)
    position.loader = weakref.ref(later)
    _positions[later] = position
    del _positions[earlier]


@functools.cache
def watch_iterations() -> None:
    """Let ``DataLoader.__iter__`` update the positions. Other wrappers of it must be installed later."""
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
    """Generators of the loader and its samplers, without duplicates."""
    holders = (loader, loader.sampler, loader.batch_sampler)
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(item): item for item in found if isinstance(item, torch.Generator)}.values())


def _capture_all(loader: Loader) -> dict[str, Any]:
    return {**randomness.capture(), "generators": [item.get_state() for item in _generators(loader)]}


def _set_all(loader: Loader, state: dict[str, Any]) -> None:
    randomness.restore(state)
    for generator, own in zip(_generators(loader), state["generators"], strict=False):
        generator.set_state(own)
