"""Random numbers of a divided loader: batches are drawn with common ones, samples loaded with each rank's own."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from ...checkpoint import randomness
from ..core.agreement import of_every_rank
from ..core.rng import GOLDEN
from .loading_state import LoadingState, Snapshot

T = TypeVar("T")

_ODD = 0xD1342543DE82EF95
_NONE = object()


class Common:
    """A context in which all ranks draw the same random numbers. It is reentrant.

    A generator with the same state on all ranks is not changed. If states differ (ranks seeded with their numbers),
    rank 0's state is used in the context, and kept separate from this rank's state.
    """

    def __init__(self) -> None:
        self._theirs: randomness.State = {}
        self._mine: randomness.State = {}
        self._depth = 0

    def begin(self, loader: DataLoader[Any]) -> None:
        """Compare the ranks' generators, at the same point on all. Generators of the loader get rank 0's state."""
        holders = (loader, loader.sampler, loader.batch_sampler)
        found = [getattr(holder, "generator", None) for holder in holders]
        generators = [one for one in found if isinstance(one, torch.Generator)]
        states = {
            **randomness.capture(randomness.ON_CPU),
            "loader": [generator.get_state() for generator in generators],
        }
        of_all = of_every_rank({name: _digest(state) for name, state in states.items()})
        differing = [name for name in states if any(other.get(name) != of_all[0].get(name) for other in of_all)]
        self._theirs = {}
        if any(digests != of_all[0] for digests in of_all):
            theirs: list[Any] = [{name: states[name] for name in differing}]
            dist.broadcast_object_list(theirs, src=0)
            for generator, state in zip(generators, theirs[0].pop("loader", ()), strict=False):
                generator.set_state(state)
            if dist.get_rank():  # rank 0 uses its own, so its next iteration draws others
                self._theirs = theirs[0]

    def __enter__(self) -> None:
        self._depth += 1
        if self._theirs and self._depth == 1:
            self._mine = randomness.capture(self._theirs)
            randomness.restore(self._theirs)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._theirs and self._depth == 0:
            self._theirs = randomness.capture(self._theirs)
            randomness.restore(self._mine)


class OwnNumbers:
    """From ``begin`` to ``end`` all generators give numbers of this rank only. After that they continue as before.

    The common state does not advance in between: else it would differ between ranks that drew and ranks that did not.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._times = rank, 0
        self._before: randomness.State | None = None

    def begin(self) -> None:
        self._before = randomness.capture(randomness.ON_CPU)  # samples are loaded on the CPU
        self._times += 1
        number = _crc(self._before["torch"]) + self._times * _ODD + (self._rank + 1) * GOLDEN
        randomness.seed(number % 2**63)

    def end(self) -> None:
        """Restore the state of ``begin``, if it was called."""
        before, self._before = self._before, None
        if before is not None:
            randomness.restore(before)


_DRAWS = "its samples are loaded with random numbers, and a rank that loads fewer samples draws others"
_CHANGES = (
    "loading its samples changes a counter, a cache or an iterator, and a rank that loads fewer samples does less"
)


class Drawn:
    """What the loading of samples changes beside them: random numbers are drawn, or something else is another one."""

    def __init__(self, *loading: Any) -> None:
        """``loading``: the dataset and the ``collate_fn``."""
        self._own = LoadingState(*loading)
        self._then: tuple[list[int], Snapshot] | None = None
        self._looks = 0

    def begin(self) -> None:
        """Samples are about to be loaded in this process."""
        self._then = self._now()

    def objection(self) -> str | None:
        """Why fewer samples leave something else, from ``begin`` or from the last call; None if they do not.

        Other values do not count at first: a file is opened, a table is built.
        """
        if self._then is None:
            return None
        (states, before), self._then = self._then, self._now()
        self._looks += 1
        now, after = self._then
        if states != now or before.other_numbers(after):
            return _DRAWS
        return _CHANGES if after.iterates or (self._looks > 1 and before.other_values(after)) else None

    def _now(self) -> tuple[list[int], Snapshot]:
        return [_digest(state) for state in randomness.capture(randomness.ON_CPU).values()], self._own.capture()


class WatchedWorkers:
    """A ``worker_init_fn``: samples are loaded from here on."""

    def __init__(self, own: Callable[[int], None] | None, drawing: Drawn) -> None:
        self._own, self._drawing = own, drawing

    def __call__(self, worker: int) -> None:
        if self._own is not None:
            self._own(worker)
        self._drawing.begin()


def draws(loader: DataLoader[Any]) -> bool:
    """Whether loading samples may draw random numbers. It does not if tensors are only indexed and stacked."""
    dataset = loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is not TensorDataset or loader.collate_fn is not default_collate


def loads(batches: Iterator[T], loaded: Callable[[], None]) -> Iterator[T]:
    """``batches``; ``loaded`` is called after each of them was loaded or failed to load, before user code goes on."""
    while True:
        try:
            batch: Any = next(batches, _NONE)
        finally:
            loaded()
        if batch is _NONE:
            return
        yield batch


class WorkerSeeds:
    """A ``worker_init_fn``: the workers of each rank draw different random numbers."""

    def __init__(self, own: Callable[[int], None] | None, rank: int) -> None:
        self._own, self._rank = own, rank

    def __call__(self, worker: int) -> None:
        randomness.seed((torch.initial_seed() + self._rank * GOLDEN) % 2**63)
        if self._own is not None:
            self._own(worker)


def _crc(state: torch.Tensor, before: int = 0) -> int:
    return zlib.crc32(state.numpy().tobytes(), before)


def drew(before: randomness.State, after: randomness.State) -> bool:
    """Whether random numbers were drawn between two captures."""
    return any(_digest(state) != _digest(after[name]) for name, state in before.items())


def _digest(state: Any) -> int:
    """A digest of one generator's state, or of a list of torch's states."""
    if isinstance(state, torch.Tensor):
        return _crc(state)
    if isinstance(state, list):
        return zlib.crc32(repr([_crc(one) for one in state]).encode())
    return zlib.crc32(repr([part.tolist() if hasattr(part, "tolist") else part for part in state]).encode())
