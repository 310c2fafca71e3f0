"""The trial of a forward: it runs on fewer samples than the batch has, and each operation is followed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...protocol.errors import StrategyError
from ..analysis import packing
from ..analysis.batchwise import BatchwiseTracker
from ..analysis.divisors import divisor_of
from ..analysis.lattice import Fact, Mixed, Rows, Same, Total, Unknown
from ..analysis.leftovers import changed_buffer, kept_beside, no_trace
from ..core.outputs import numbers_in, opening
from ..core.rng import OwnStream, undone
from ..core.scatter import BatchShard, tensors_in
from ..core.side_effects import other_notes
from ..sharded.unsharded import recover
from .halves import Window, at_least_two, halves_differ, window, without_chance
from .placing import Dims, narrowed
from .ways import AddedParts, JoinedRows, SameEverywhere, Way

_NUMBERS = "numbers that it returns"
Call = Callable[..., Any]


@dataclass(frozen=True)
class Refused:
    """Why a forward cannot be divided."""

    reason: str


class Trial:
    """Finds how the outputs of the global batch are combined from parts. Errors of the forward are not raised."""

    def __init__(
        self, rank: int, whole_batch: Callable[[], AbstractContextManager[None]], *, trusted: bool, anywhere: bool
    ) -> None:
        """``anywhere``: samples may be in another dimension of the inputs than the first."""
        self._rank, self._whole_batch, self._trusted, self._anywhere = rank, whole_batch, trusted, anywhere
        self.follows_packing = True

    def __call__(
        self, forward: Call, module: nn.Module, inputs: Any, share: BatchShard, dims: Dims
    ) -> tuple[Way, ...] | Refused:
        """``inputs``: positional and keyword arguments; ``dims``: the dimensions of their samples."""
        forward = opening(forward)
        low, high = at_least_two(share)
        size = high - low
        part_args, part_kwargs = narrowed(inputs, dims, low, high)
        entered = {
            part: dim for part, dim in zip(tensors_in((part_args, part_kwargs)), dims, strict=True) if dim is not None
        }
        tracker = BatchwiseTracker()
        try:
            with no_trace(module), undone(), OwnStream(self._rank), torch.enable_grad():
                before = {name: buffer.clone() for name, buffer in module.named_buffers()}
                follows = packing.followed(tracker) if self.follows_packing else contextlib.nullcontext()
                with tracker, follows, self._whole_batch():
                    for part, dim in entered.items():
                        tracker.enters(part, size, dim)
                    outputs = forward(*part_args, **part_kwargs)
                    changed = changed_buffer(module, before, tracker)
                made = tensors_in(outputs)
                ways = [self._way(tracker.fact(tensor), tensor, size) for tensor in made]
                held = sum(tensor.nbytes for tensor in (*entered, *made)) / size
                del outputs, made
                kept = kept_beside(tracker, [*entered, *module.buffers()])
            notes: list[dict[str, Any]] = []
            differ = self._halves_differ(forward, module, inputs, window(share, held), dims, ways, notes)
        except StrategyError as error:
            return Refused(error.message)
        except Exception as error:  # noqa: BLE001  # the user's forward may raise anything on fewer samples
            recover(module)
            why = _likely_cause(list(entered), tensors_in(inputs), share.total)
            return Refused(
                f"with {size} of the {share.total} samples it raises {type(error).__name__}: {error} ({why}?)"
            )
        said = "" if self._trusted else _beside_its_outputs(differ, changed, kept, notes, tracker.branch)
        if said:
            return Refused(said)
        refusal = next((way for way in ways if isinstance(way, Refused)), None)
        return refusal or tuple(way for way in ways if not isinstance(way, Refused))

    def _halves_differ(
        self,
        forward: Call,
        module: nn.Module,
        inputs: Any,
        tried: Window,
        dims: Dims,
        ways: Sequence[Way | Refused],
        notes: list[dict[str, Any]],
    ) -> bool:
        """Whether a run in halves disproves the result; adds the notes of the undivided run and of the parts.

        Every rank runs it, whatever it has found: the forward of a sharded model communicates.
        """

        lengths: list[int] = []

        def outputs(low: int, high: int) -> Any:
            part_args, part_kwargs = narrowed(inputs, dims, low, high)
            is_whole = high - low == tried.stop - tried.start
            padded = packing.Padded(packing.noting(lengths) if is_whole else packing.as_noted(lengths))
            with no_trace(module) as belongings, without_chance(module), self._whole_batch(), padded:
                made = forward(*part_args, **part_kwargs)
                own = {name: one for name, one in belongings.changed().items() if isinstance(one, float)}
                notes.append(belongings.noted() | own | {_NUMBERS: numbers_in(made)})
                return made

        def join(halves: Sequence[list[torch.Tensor]], first: int) -> list[torch.Tensor | None]:
            if not len(ways) == len(halves[0]) == len(halves[1]):
                return []
            first_and_other = (first, tried.stop - tried.start - first)
            return [_joined(way, (one, other), first_and_other) for way, one, other in zip(ways, *halves, strict=True)]

        return halves_differ(outputs, tried, join)

    def _way(self, fact: Fact, output: torch.Tensor, size: int) -> Way | Refused:
        kind = fact.kind
        if isinstance(kind, Same):
            spread = output.dim() > 0 and output.stride(0) == 0 and output.size(0) == size  # ``std.expand_as(mean)``
            return JoinedRows(0, single=True) if spread else SameEverywhere()
        if isinstance(kind, Rows) and kind.over is None and kind.owners.selection is kind.owners.order is None:
            vector, samples = kind.owners.vector, torch.arange(size)
            if torch.equal(vector, samples.repeat_interleave(len(vector) // max(1, size))):
                return JoinedRows(kind.dim, single=len(vector) == size)
            if self._anywhere and torch.equal(vector, samples.repeat(len(vector) // max(1, size))):
                return JoinedRows(kind.dim, turns=True)
        if isinstance(kind, Rows) and kind.owners.order is not None and not self._trusted:
            return Refused("an output is in a sorted order: bring it back into the order of the samples")
        if isinstance(kind, Total) and not kind.floored:
            if kind.den is None:
                return AddedParts(mean=False)
            if divisor_of(output) is not None:
                return AddedParts(mean=True, counted=True)
            if kind.den.counts_samples and not kind.den.full:
                return AddedParts(mean=True)
        if self._trusted:
            return JoinedRows(0) if output.dim() and output.size(0) % size == 0 else SameEverywhere()
        if isinstance(kind, Mixed | Unknown):
            where = f" ({kind.place})" if kind.place else ""
            return Refused(f"{kind.operation} {kind.why}{where}")
        return Refused("an output is a weighted mean, or not in the order of the samples")


def _beside_its_outputs(
    differ: bool, changed: str | None, kept: str | None, notes: Sequence[dict[str, Any]], branch: object
) -> str:
    """Why a forward cannot be divided although its outputs can be joined; empty if it can."""
    if differ:
        return "its result for a sample changes when the batch has fewer samples"
    if changed:
        return f"its buffer {changed} changes with the samples of the batch"
    if kept is not None:
        return f"it keeps {kept} of the batch outside its outputs (in an attribute or a hook): return it from forward"
    elsewhere = next(filter(None, (other_notes(notes[0], one) for one in notes[1:])), None)
    if elsewhere == _NUMBERS:
        return (
            "it returns a number or an array (not a tensor) that changes with fewer samples: compute it from the "
            "model's outputs, or return a tensor with a value for each sample"
        )
    if elsewhere is not None:
        return f"it stores something about its samples in {elsewhere}, and each rank would store only its own"
    if branch is not None:
        return (
            f"{branch} branches on a value of its samples, so ranks may branch differently: compute that before the "
            "model is called, where every rank has the whole batch, and pass it as an argument"
        )
    return ""


def _joined(
    way: Way | Refused, parts: tuple[torch.Tensor, torch.Tensor], samples: tuple[int, int]
) -> torch.Tensor | None:
    """The joined output of two parts with these numbers of samples; None if it cannot be joined."""
    one, other = parts
    if isinstance(way, JoinedRows) and way.turns:
        in_turns = [part.unflatten(way.dim, (-1, count)) for part, count in zip(parts, samples, strict=True)]
        return torch.cat(in_turns, way.dim + 1).flatten(way.dim, way.dim + 1)
    if isinstance(way, JoinedRows):
        return torch.cat(parts, way.dim)
    if isinstance(way, AddedParts) and not way.counted:
        first = samples[0] / sum(samples)
        return first * one + (1 - first) * other if way.mean else one + other
    return one if isinstance(way, SameEverywhere) else None


def _likely_cause(cut: Sequence[torch.Tensor], given: Sequence[torch.Tensor], samples: int) -> str:
    """The most common cause of a failure on fewer samples."""
    if all(tensor.dim() == 1 for tensor in cut):
        return "is it given one sample, without a batch"
    if any(tensor.dim() > 1 and samples in tensor.shape[1:] and tensor.size(0) != samples for tensor in given):
        return "is the batch not the first dimension, as in the hidden states of an LSTM"
    return "is a batch size written in the model as a number, or is the batch not the first dimension"
