"""The indices of a loop's batches: whole, or this rank's share of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from ..core.scatter import BatchShard as Share
from .sampler_rng import OwnNumbers


@dataclass
class Drawing:
    """The batches of one iteration. ``sliced``: whether the next one is divided over the ranks.

    ``batches``: for each batch that was drawn, in order, its total number of samples and whether it is divided.
    """

    sliced: bool = False
    batches: deque[tuple[int, bool]] = field(default_factory=deque)

    def forget(self, count: int) -> None:
        """Drop the first ``count`` batches that were drawn: no loop gets them."""
        for _ in range(count):
            self.batches.popleft()


class LoopPart:
    """In place of a loader's batch sampler: the indices of each batch, or this rank's share of them.

    Each iteration uses the ``Drawing`` that ``drawing`` held when it began. The samples of a share are loaded with
    random numbers of the rank's own, until ``loaded``. With common ones a rank with one row more would draw more
    numbers, and the ranks would shuffle the next epoch differently.
    """

    def __init__(self, sampler: Any, group: dist.ProcessGroup, own: OwnNumbers | None) -> None:
        self._sampler, self._group, self._own = sampler, group, own
        self.drawing = Drawing()
        self.loads: Callable[[], None] = _nothing
        """Called when the samples of a batch are about to be loaded, unless workers load them."""

    def __iter__(self) -> Iterator[list[Any]]:
        return self._draw(self.drawing)

    def _draw(self, drawing: Drawing) -> Iterator[list[Any]]:
        for batch in self._sampler:
            indices = list(batch)
            sliced = drawing.sliced and len(indices) >= self._group.size()
            drawing.batches.append((len(indices), sliced))
            if sliced and self._own is not None:
                self._own.begin()
            self.loads()
            yield indices[Share(len(indices), self._group).mine] if sliced else indices
            self.loaded()

    def loaded(self) -> None:
        """The samples are loaded: use the common random numbers again."""
        if self._own is not None:
            self._own.end()

    def __len__(self) -> int:
        return len(self._sampler)


def _nothing() -> None:
    """In place of ``LoopPart.loads``."""
