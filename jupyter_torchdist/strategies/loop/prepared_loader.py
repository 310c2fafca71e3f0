"""Prepared loaders: each rank loads its rows of every global batch.

The batches are the same as on one device: the same sampler draws the same indices on all ranks, and each rank loads its
share of them. A batch with fewer samples than ranks is loaded completely by all. The indices are drawn with random
numbers common to all ranks; samples are loaded (noise, augmentation) with numbers of the rank's own.
"""

from __future__ import annotations

import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ...checkpoint.position import position_of
from ...protocol.errors import StrategyError
from ..core.agreement import of_every_rank
from ..core.context import ParallelContext
from ..core.scatter import BatchShard, rows_of, to_device
from .sampler_rng import Common, OwnNumbers, WorkerSeeds, loads

Loader = DataLoader[Any]


@dataclass(frozen=True)
class Batch:
    """The batch of a step: its total number of samples, and this rank's rows; None if every rank has all rows."""

    total: int
    rows: BatchShard | None

    @property
    def weight(self) -> float | None:
        """The weight of this rank's mean in the mean of the batch; None: the same as on other ranks."""
        return None if self.rows is None else self.rows.weight


class Loaders:
    """The prepared loaders of a job."""

    def __init__(self, context: ParallelContext) -> None:
        self._group, self._device = context.data_group, context.device
        self._own = OwnNumbers(int(self._group.rank()))
        self._known: weakref.WeakKeyDictionary[Loader, Indices] = weakref.WeakKeyDictionary()
        self._in_flight: dict[int, Batch] = {}
        self._untold: int | None = None
        """Samples of the batch that was given last, until ``taken``."""

    def __contains__(self, loader: Loader) -> bool:
        return loader in self._known

    def add(self, loader: Loader) -> None:
        """From now on the batches of ``loader`` are this rank's rows."""
        self._known[loader] = self._indices(loader)
        vars(loader)["_iterator"] = None  # existing persistent workers do not know the change

    def _indices(self, loader: Loader) -> Indices:
        return Indices(self._group, None if loader.num_workers else self._own)

    def taken(self) -> int | None:
        """Samples of the latest batch, once; None: unknown, or told before."""
        untold, self._untold = self._untold, None
        return untold

    def in_flight(self) -> list[Batch]:
        """The batches that user code works on now, one for each loop."""
        return list(self._in_flight.values())

    def iterate(self, original: Callable[..., Any], loader: Loader) -> Iterator[Any]:
        """In place of ``DataLoader.__iter__``; collective for a prepared loader. Raises ``StrategyError``."""
        indices = self._known.get(loader)
        if indices is None or self._group.size() == 1:
            return original(loader) if self._device.type == "cpu" else self._moved(original(loader))
        if _draws_indices(loader):
            if not loader.persistent_workers:  # these use their first batch sampler in every epoch
                indices = self._indices(loader)
            return self._noted(self._shares(original, loader, indices))
        return self._noted(self._streamed(original, loader))

    def _moved(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield to_device(batch, self._device)

    def _noted(self, batches: Iterator[tuple[Batch, Any]]) -> Iterator[Any]:
        """Record the current batch while user code works on it."""
        key = id(batches)
        try:
            for batch, values in batches:
                self._in_flight[key] = batch
                self._untold = batch.total
                yield to_device(values, self._device)
        finally:
            self._in_flight.pop(key, None)

    def _shares(self, original: Callable[..., Any], loader: Loader, indices: Indices) -> Iterator[tuple[Batch, Any]]:
        """Batches of which each rank loads only its own samples."""
        indices.begin(loader)
        rank = int(self._group.rank())
        changes: dict[str, Any] = {"batch_sampler": indices}
        if rank:
            changes["worker_init_fn"] = WorkerSeeds(loader.worker_init_fn, rank)
        with _changed(loader, changes), indices.common:
            inner = original(loader)
            indices.loaded()
        position = position_of(loader)
        for _ in range(min(position.batches, len(indices.drawn)) if position is not None and position.live else 0):
            indices.drawn.popleft()  # seen by an earlier run

        def batches() -> Iterator[tuple[Batch, Any]]:
            for values in loads(inner, indices.loaded):
                yield indices.drawn.popleft(), values
            indices.compare()

        return batches()

    def _streamed(self, original: Callable[..., Any], loader: Loader) -> Iterator[tuple[Batch, Any]]:
        """Batches that cannot be drawn by index: every rank reads all samples and keeps its own."""
        rank, ranks = int(self._group.rank()), int(self._group.size())
        collated = loader.batch_sampler is not None
        changes = {"collate_fn": CollateShare(loader.collate_fn, rank, ranks)} if collated else {}
        with _changed(loader, changes):
            inner = original(loader)

        def batches() -> Iterator[tuple[Batch, Any]]:
            first = True
            for values in inner:
                total, digest, part = values if collated else _cut(values, self._group)
                if first:
                    self._agree_on_the_stream(digest)
                first = False
                yield Batch(total, BatchShard(total, self._group) if total >= ranks else None), part

        return batches()

    def _agree_on_the_stream(self, digest: int) -> None:
        if len(set(of_every_rank(digest))) > 1:
            raise StrategyError(
                "the ranks read different streams of samples: with a prepared loader all ranks read one stream, and "
                "each rank takes its rows of it",
                "let the dataset give every rank the same samples; or, where it divides them itself, do not prepare "
                "its loader",
            )


def check(loader: Loader) -> None:
    """Raise ``StrategyError`` for a loader that already divides its batches."""
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise StrategyError(
            "this DataLoader has a DistributedSampler: its batches are divided among the ranks already",
            "leave the sampler out (shuffle=True): td.prepare divides whole batches",
        )


def _draws_indices(loader: Loader) -> bool:
    return loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset)


@contextmanager
def _changed(loader: Loader, attributes: dict[str, Any]) -> Iterator[None]:
    """Change attributes of the loader while an iterator is made. ``vars``, because it forbids setting some of them."""
    before = {name: vars(loader)[name] for name in attributes}
    vars(loader).update(attributes)
    try:
        yield
    finally:
        vars(loader).update(before)


class Indices:
    """In place of a loader's batch sampler: the indices of this rank's samples of each batch."""

    def __init__(self, group: dist.ProcessGroup, own: OwnNumbers | None) -> None:
        self._group, self._own = group, own
        self.common = Common()
        self._sampler: Any = None
        self.drawn: deque[Batch] = deque()
        self._digest = 0

    def __len__(self) -> int:
        return len(self._sampler)

    def begin(self, loader: Loader) -> None:
        """An iteration begins on all ranks. Raises ``StrategyError`` if their numbers of batches differ."""
        if loader.batch_sampler is not self:
            self._sampler = loader.batch_sampler
        self.drawn.clear()
        self._digest = 0
        lengths = of_every_rank(_length(self._sampler))
        if len(set(lengths)) > 1:
            raise StrategyError(
                f"the ranks' loaders have different numbers of batches: {lengths}",
                "give every rank the same dataset: a prepared loader divides each batch of it",
            )
        self.common.begin(loader)

    def __iter__(self) -> Iterator[list[Any]]:
        batches: Iterator[Sequence[Any]] | None = None
        while True:
            with self.common:
                batches = iter(self._sampler) if batches is None else batches
                batch = next(batches, None)
            if batch is None:
                return
            indices = list(batch)
            rows = BatchShard(len(indices), self._group)
            self.drawn.append(Batch(rows.total, rows if rows.total >= rows.ranks else None))
            self._digest = _digest_of(indices, self._digest)
            if self._own is not None and rows.total >= rows.ranks:
                self._own.begin()
            yield indices[rows.mine] if rows.total >= rows.ranks else indices
            self.loaded()

    def compare(self) -> None:
        """At the end of an iteration: raise ``StrategyError`` if the ranks drew different batches."""
        if len(set(of_every_rank(self._digest))) > 1:
            raise StrategyError(
                "the ranks' samplers drew different batches: samples were left out, and others were taken twice",
                "let the sampler draw from a torch.Generator of its own, with the same seed on all ranks",
            )

    def loaded(self) -> None:
        """The samples are loaded: use the common random numbers again."""
        if self._own is not None:
            self._own.end()


def _length(sampler: Any) -> int:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return -1


def _digest_of(indices: list[Any], before: int) -> int:
    """A digest of the indices that were drawn. Of keys that are not numbers, only the count is used."""
    try:
        return zlib.crc32(array("q", indices).tobytes(), before)
    except TypeError:
        return zlib.crc32(str(len(indices)).encode(), before)


class CollateShare:
    """A ``collate_fn``: gives the number of samples, a digest of the first one, and this rank's samples, collated."""

    def __init__(self, own: Callable[[list[Any]], Any], rank: int, ranks: int) -> None:
        self._own, self._rank, self._ranks = own, rank, ranks

    def __call__(self, samples: list[Any]) -> tuple[int, int, Any]:
        total = len(samples)
        mine = samples[rows_of(self._rank, self._ranks, total)] if total >= self._ranks else samples
        return total, _digest_of_values(samples[0]), self._own(mine)


def _digest_of_values(values: Any, before: int = 0) -> int:
    if isinstance(values, torch.Tensor):
        some = values.detach().reshape(-1)[:1024].cpu().contiguous()
        return zlib.crc32(some.view(torch.uint8).numpy().tobytes() if some.numel() else b"", before)
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, (list, tuple)):
        for value in values:
            before = _digest_of_values(value, before)
        return before
    return zlib.crc32(repr(values).encode(), before) if isinstance(values, (int, float, str, bytes)) else before


def _cut(values: Any, group: dist.ProcessGroup) -> tuple[int, int, Any]:
    """The number of samples, a digest and this rank's rows of a complete batch from the dataset.

    Raises ``StrategyError`` if the batch has no clear number of rows.
    """
    sizes: set[int | None] = set()

    def look(value: Any) -> None:
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, (list, tuple)):
            for one in value:
                look(one)
        else:
            rows = isinstance(value, torch.Tensor) and value.dim() > 0
            sizes.add(value.size(0) if rows else None)

    look(values)
    total = sizes.pop() if len(sizes) == 1 else None
    if total is None:
        raise StrategyError(
            "a loader without a batch sampler gives batches that are not tensors with the same number of rows, so they "
            "cannot be divided among the ranks",
            "give the DataLoader a batch_size, or let its dataset give tensors with the samples in dimension 0",
        )
    rows = BatchShard(total, group)
    digest = _digest_of_values(values)
    if total < rows.ranks:
        return total, digest, values

    def mine(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[rows.mine]
        if isinstance(value, dict):
            return {name: mine(one) for name, one in value.items()}
        parts = [mine(one) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)

    return total, digest, mine(values)
