"""A forward that leaves no trace, for trials.

What it takes from iterators of the cell (counters, generators, loaders) is given again to the training.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint

from ...protocol.errors import StrategyError
from ...torch_private.autograd import saved_tensors_hooks
from ..core.side_effects import Belongings, is_iterator
from ..sharded.unsharded import units_in

_MANY = 10_000
"""How many entries of a container are looked at."""


class Replayed(Iterator[Any]):
    """An iterator that can go back."""

    def __init__(self, original: Iterator[Any]) -> None:
        self.place, self._original, self._taken = 0, original, list[Any]()

    def __next__(self) -> Any:
        if self.place == len(self._taken):
            self._taken.append(next(self._original))
        self.place += 1
        return self._taken[self.place - 1]

    def send(self, value: Any) -> Any:
        """Raises ``StrategyError``: what a generator was told cannot be taken back."""
        if value is None:
            return next(self)
        raise StrategyError("its forward sends values to a generator", "keep them in an attribute or a buffer")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def from_the_beginning(self) -> Iterator[Any]:
        """The original, or another one with what was taken from it in front."""
        if self._taken and type(self._original) is itertools.count:
            counter: Any = self._original
            return itertools.count(self._taken[0], *counter.__reduce__()[1][1:])
        return itertools.chain(self._taken, self._original) if self._taken else self._original


class LentIterators:
    """Replaces the iterators in containers and attributes of the cell until ``end``."""

    def __init__(self, snapshots: Iterable[tuple[Any, Any]]) -> None:
        """``snapshots``: each container, and a copy of it, which is to have the same entries as the container."""
        self._lent: dict[int, tuple[Iterator[Any], Replayed, int]] = {}
        self._entries: list[tuple[Any, Any, Replayed]] = []
        for container, before in snapshots:
            entries = before.items() if isinstance(before, dict) else enumerate(before)
            for key, value in list(itertools.islice(entries, _MANY)):
                if is_iterator(value):
                    before[key] = container[key] = self._replayed(value)
                    self._entries.append((container, key, before[key]))

    def _replayed(self, value: Iterator[Any]) -> Replayed:
        """The iterator that goes back; the same for the same ``value``."""
        if id(value) not in self._lent:
            replayed = value if isinstance(value, Replayed) else Replayed(value)
            self._lent[id(value)] = value, replayed, replayed.place
        return self._lent[id(value)][1]

    def end(self) -> None:
        """Go back, and put the iterators where they were."""
        rest = {}
        for value, replayed, place in self._lent.values():
            replayed.place = place
            rest[id(replayed)] = replayed if value is replayed else replayed.from_the_beginning()
        for container, key, replayed in self._entries:
            container[key] = rest[id(replayed)]


def _unseen_by_checkpoints() -> contextlib.AbstractContextManager[None]:
    """Hide saved tensors from an enclosing ``torch.utils.checkpoint``, which counts them."""
    if not within_checkpoint():
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, _as_it_is)


def within_checkpoint() -> bool:
    """Whether a non-reentrant checkpoint is active, which recomputes activations instead of saving them."""
    hooks = saved_tensors_hooks()
    return hooks is not None and hooks[0].__module__ == checkpoint.__name__


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextlib.contextmanager
def no_trace(module: nn.Module) -> Iterator[Belongings]:
    """Undo a forward's changes to a model (attributes, buffers, parameters) and to the cell; discard its prints."""
    units = units_in([module])
    for unit in units:  # what is gathered is no place of its own: writes are kept in the shards
        unit.reshard()
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    belongings, silent = Belongings(module), io.StringIO()
    iterators = LentIterators(belongings.snapshots())
    try:
        with (
            contextlib.redirect_stdout(silent),
            contextlib.redirect_stderr(silent),
            _unseen_by_checkpoints(),
            belongings.weights,
        ):
            yield belongings
    finally:
        belongings.restore()
        iterators.end()
        if belongings.weights.undo():
            for unit in units:
                unit.reshard()
        with torch.no_grad():
            for buffer, value in buffers:
                if buffer.shape == value.shape:
                    buffer.copy_(value)
                else:  # the forward has given it its size (observers of quantisation)
                    buffer.data = value
