"""Packed sequences (``torch.nn.utils.rnn``) in a forward that is divided among ranks.

PyTorch's functions for packing, for recurrent layers on packed data and for padding read lengths in C++. So they
cannot be followed operation by operation; ``followed`` has rules for them instead. A padded result is as long as the
longest sequence of the rank; ``Padded`` makes it as long as the longest sequence of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ...torch_private.places import disable_current_modes
from ...torch_private.tensors import VF
from ..core.patches import Patches
from .batchwise import BatchwiseTracker
from .lattice import Kind, Mixed, Noise, Rows, Same, Unknown, uniform
from .numerals import user_place
from .rules import PACK

_PAD = "_pad_packed_sequence"
_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class Padded:
    """Within it, sequences are padded to the length ``longest(packed data, own length)``.

    It is entered at each forward of a divided model.
    """

    def __init__(self, longest: Callable[[torch.Tensor, int], int]) -> None:
        self._longest = longest
        self._before: list[Callable[..., Any]] = []

    def __enter__(self) -> None:
        self._before.append(getattr(VF, _PAD))
        setattr(VF, _PAD, self._pad)

    def __exit__(self, *_: object) -> None:
        setattr(VF, _PAD, self._before.pop())

    def _pad(self, data: torch.Tensor, sizes: torch.Tensor, batch_first: bool, value: float, length: int) -> Any:
        return self._before[-1](data, sizes, batch_first, value, self._longest(data, length))


def over_ranks(group: dist.ProcessGroup) -> Callable[[torch.Tensor, int], int]:
    """The maximum over all ranks; the returned function is a collective call."""

    def longest(data: torch.Tensor, length: int) -> int:
        most = torch.tensor(length, device=data.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group)
        return int(most)

    return longest


def noting(lengths: list[int]) -> Callable[[torch.Tensor, int], int]:
    """Leaves the length unchanged, and appends it to ``lengths``."""

    def longest(_: torch.Tensor, length: int) -> int:
        lengths.append(length)
        return length

    return longest


def as_noted(lengths: Sequence[int]) -> Callable[[torch.Tensor, int], int]:
    """At least the noted length of the same call on more samples."""
    noted = iter(lengths)
    return lambda _, length: max(length, next(noted, length))


@contextmanager
def followed(tracker: BatchwiseTracker) -> Iterator[None]:
    """Within it, ``tracker`` has rules for packing, recurrent layers on packed sequences, and padding."""
    of = _Packed(tracker)
    functions: dict[str, Callable[..., Any]] = {PACK: of.pack, **dict.fromkeys(_LAYERS, of.layers), _PAD: of.pad}
    with _replaced({name: _aside(function, layer=name in _LAYERS) for name, function in functions.items()}):
        yield


class _Packed:
    """PyTorch's functions on packed sequences; each tells ``tracker`` the kinds of its results."""

    def __init__(self, tracker: BatchwiseTracker) -> None:
        self._tracker = tracker

    def pack(self, original: Callable[..., Any], data: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
        kind, of_lengths = self._tracker.kind(data), self._tracker.kind(lengths)
        packed, sizes = original(data, lengths, batch_first)
        if isinstance(kind, Same | Noise) and isinstance(of_lengths, Same | Noise):
            return packed, sizes
        found: Kind = Mixed(PACK, "packs samples with the lengths of other samples", user_place())
        if (rows := _alike(kind, of_lengths, 0 if batch_first else 1)) is not None:
            vector = torch.cat([rows.owners.vector[:count] for count in sizes.tolist()])
            selection = (rows.owners.selection, self._tracker.number(lengths))
            found = Rows(0, rows.owners.but(vector=vector, selection=selection, order=(PACK, rows.owners.order)))
        self._tracker.learn(packed, found)
        self._tracker.learn(
            sizes, Mixed(PACK, "counts how many sequences of the batch reach each length", user_place())
        )
        return packed, sizes

    def layers(self, original: Callable[..., Any], data: torch.Tensor, sizes: torch.Tensor, *args: Any) -> Any:
        states, weights, *_ = args
        begins = states if isinstance(states, (tuple, list)) else (states,)
        output, *hidden = original(data, sizes, *args)
        sequences = _sequences(self._tracker, data, sizes)
        if (
            sequences is not None
            and all(isinstance(self._tracker.kind(weight), Same | Noise) for weight in weights)
            and all(_begins(self._tracker, state, sequences) for state in begins)
        ):
            self._tracker.learn(output, self._tracker.kind(data))
            for state in hidden:
                self._tracker.learn(state, Rows(1, sequences.owners))
        else:
            self._lose((data, sizes, *begins, *weights), (output, *hidden), "uses states or weights of other samples")
        return output, *hidden

    def pad(
        self, original: Callable[..., Any], data: torch.Tensor, sizes: torch.Tensor, batch_first: bool, *args: Any
    ) -> Any:
        output, lengths = original(data, sizes, batch_first, *args)
        if (sequences := _sequences(self._tracker, data, sizes)) is not None:
            self._tracker.learn(output, Rows(0 if batch_first else 1, sequences.owners))
            self._tracker.learn(lengths, sequences)
        else:
            self._lose((data, sizes), (output, lengths), "pads something that is not a packed batch")
        return output, lengths

    def _lose(self, given: Iterable[torch.Tensor], made: Iterable[torch.Tensor], why: str) -> None:
        """Mark results that mix samples in an unsupported way."""
        kinds = [self._tracker.kind(tensor) for tensor in given]
        if all(isinstance(kind, Same | Noise) for kind in kinds):
            return
        lost = next((kind for kind in kinds if isinstance(kind, Mixed | Unknown)), None)
        for tensor in made:
            self._tracker.learn(tensor, lost or Mixed("a recurrent layer", why, user_place()))


def _aside(function: Callable[..., Any], *, layer: bool) -> Callable[..., Any]:
    """Call ``function`` outside the tracker. A ``layer`` on data that is not packed is followed as usual."""

    def chosen(original: Callable[..., Any], *args: Any) -> Any:
        if layer and not _is_packed(args):
            return original(*args)
        with disable_current_modes():
            return function(original, *args)

    return chosen


def _is_packed(args: Sequence[Any]) -> bool:
    """Whether a recurrent layer gets packed data and batch sizes, not padded data and states."""
    return isinstance(args[1], torch.Tensor) and not args[1].is_floating_point()


def _alike(kind: Kind, of_lengths: Kind, dim: int) -> Rows | None:
    """The rows of the data if the lengths belong to the same samples in the same order; else None."""
    if not isinstance(kind, Rows) or not isinstance(of_lengths, Rows) or (kind.dim, of_lengths.dim) != (dim, 0):
        return None
    return kind if kind.over is of_lengths.over is None and kind.owners.agrees(of_lengths.owners) else None


def _sequences(tracker: BatchwiseTracker, data: torch.Tensor, sizes: torch.Tensor) -> Rows | None:
    """The samples of packed data, in the order of packing; None if it is not known."""
    kind = tracker.kind(data)
    if not isinstance(kind, Rows) or kind.dim or not isinstance(kind.owners.order, tuple):
        return None
    _, order = kind.owners.order
    assert isinstance(kind.owners.selection, tuple)
    vector = kind.owners.vector[: int(sizes[0])]
    return Rows(0, kind.owners.but(vector=vector, selection=kind.owners.selection[0], order=order))


def _begins(tracker: BatchwiseTracker, state: torch.Tensor, sequences: Rows) -> bool:
    """Whether the initial states belong to the same samples, or are equal for all samples."""
    kind = tracker.kind(state)
    if isinstance(kind, Rows):
        return kind.dim == 1 and kind.over is None and kind.owners.agrees(sequences.owners)
    return isinstance(kind, Same) and uniform(state, 1, sequences.owners)


@contextmanager
def _replaced(functions: dict[str, Callable[..., Any]]) -> Iterator[None]:
    patches = Patches()
    for name, function in functions.items():
        patches.around(VF, name, function)
    try:
        yield
    finally:
        patches.undo()
