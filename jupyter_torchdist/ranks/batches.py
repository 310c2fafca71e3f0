"""How many samples the batch has that user code trains with, where it is known what the ranks have in common."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from ..strategies.core.rank_context import Way
from ..strategies.core.scatter import tensors_in
from ..torch_private.training import LOADING, index_sampler


class Batches:
    """Counts for ``rank``. ``ways``: the strategy that is at work, if any.

    Under a strategy rank 0 counts the batches of all ranks. Without one each rank counts its own, where they are its
    own: in a job of one rank, and with a ``DistributedSampler``.
    """

    def __init__(self, rank: int, ways: Callable[[], Sequence[Way]]) -> None:
        self._rank, self._ways = rank, ways
        self._alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        self._latest: int | None = None

    def install(self) -> None:
        """Wrap the iterators of loaders in this process."""
        if LOADING is None:
            return
        original: Any = LOADING.__next__

        @functools.wraps(original)
        def given(iterator: Any) -> Any:
            batch = original(iterator)
            self._latest = self._samples(iterator, batch)
            return batch

        LOADING.__next__ = given

    def samples(self) -> int | None:
        """Of the latest batch, once; None: unknown, told before, or counted by another rank."""
        latest, self._latest = self._latest, None
        if not (ways := self._ways()):
            return latest
        return None if self._rank else ways[-1].samples()

    def _samples(self, iterator: Any, batch: Any) -> int | None:
        indices = index_sampler(iterator)
        if not (self._alone and hasattr(indices, "batch_size")) and not isinstance(
            getattr(indices, "sampler", None), DistributedSampler
        ):
            return None
        first = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
        tensor = first if isinstance(first, torch.Tensor) else next(iter(tensors_in(batch)), None)
        return tensor.size(0) if tensor is not None and tensor.dim() else None
