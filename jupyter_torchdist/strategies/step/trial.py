"""The trial of a forward: it runs on fewer samples than the batch has, and each operation is followed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...protocol.errors import StrategyError
from ...torch_private.places import NormBase
from ..analysis import packing
from ..analysis.batchwise import BatchwiseTracker
from ..analysis.divisors import divisor_of
from ..analysis.lattice import Fact, Mixed, Noise, Rows, Same, Total, Unknown
from ..analysis.leftovers import changed_buffer, kept_beside
from ..core.outputs import numbers_in, opening
from ..core.rng import OwnStream, undone
from ..core.scatter import BatchShard, map_parts, tensors_in
from ..core.side_effects import Belongings, Left, is_number, other_notes
from ..sharded.unsharded import recover
from .halves import Window, at_least_two, halves_differ, window, without_chance
from .no_trace import no_trace
from .placing import Dims, narrowed
from .ways import AddedParts, Found, JoinedRows, SameEverywhere, Way, joined

_NUMBERS = "numbers that it returns"
_OBSERVING = ("torch.ao.quantization.observer", "torch.ao.quantization.fake_quantize")
_WEIGHT, _FIXED = "weight ", "tensor "
Call = Callable[..., Any]


@dataclass(frozen=True)
class Refused:
    """Why a forward cannot be divided. ``doubted``: nothing was found that mixes samples, but it is not proved."""

    reason: str
    doubted: bool = False


@dataclass
class _Seen:
    """What a trial has seen beside the outputs."""

    buffer: str | None = None
    weight: str | None = None
    kept: str | None = None
    differ: bool = False
    goes_on: str = ""
    notes: list[dict[str, Any]] = field(default_factory=list)
    integers: list[dict[str, int]] = field(default_factory=list)
    buffers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def counts(self) -> frozenset[str]:
        """Where the runs have left different integers."""
        whole, *parts = self.integers or [{}]
        return frozenset(where for one in parts for where, value in one.items() if whole.get(where, value) != value)

    def refusal(self, branch: object) -> str:
        """Why a forward cannot be divided although its outputs can be joined; empty if it can."""
        elsewhere = next(filter(None, (_other(self.notes[0], one) for one in self.notes[1:])), None)
        weight = self.weight
        if elsewhere is not None and elsewhere.startswith(_WEIGHT):
            weight = elsewhere.removeprefix(_WEIGHT)
        if weight is not None:
            return f"its forward writes its parameter {weight}, from the samples of the batch or from random numbers"
        if self.differ:
            return "its result for a sample changes when the batch has fewer samples"
        if self.goes_on:
            return (
                f"its forward reads what the forward before it has kept in {self.goes_on}: that is of the whole batch, "
                "and a rank computes only some of its samples"
            )
        buffer = self.buffer or next(filter(None, (other_notes(self.buffers[0], one) for one in self.buffers[1:])), "")
        if buffer:
            return f"its buffer {buffer} changes with the samples of the batch"
        if self.kept is not None:
            return (
                f"it keeps {self.kept} of the batch outside its outputs (in an attribute or a hook): return it from "
                "forward"
            )
        if elsewhere == _NUMBERS:
            return (
                "it returns a number or an array (not a tensor) that changes with fewer samples: compute it from the "
                "model's outputs, or return a tensor with a value for each sample"
            )
        if elsewhere is not None:
            return (
                f"it stores something about its samples, or computed from random numbers, in {elsewhere}, and each "
                "rank would store only its own"
            )
        if branch is not None:
            return (
                f"{branch} branches on a value of its samples, so ranks may branch differently: compute that before "
                "the model is called, where every rank has the whole batch, and pass it as an argument"
            )
        return ""


@dataclass(frozen=True)
class _Asked:
    """The forward that is tried, and its inputs with the dimensions of their samples."""

    forward: Call
    module: nn.Module
    inputs: Any
    dims: Dims


@dataclass(frozen=True)
class _Ran:
    """A run of some samples: its outputs and what it has changed; ``is_whole``: of all samples in the check."""

    made: Any
    belongings: Belongings
    is_whole: bool


@dataclass(frozen=True)
class _Joins:
    """How the tensors of two parts of a batch are joined: the outputs, then what is kept in ``places``."""

    ways: Sequence[Way | Refused]
    places: frozenset[str]
    tried: Window

    def join(self, halves: Sequence[list[torch.Tensor]], first: int) -> list[torch.Tensor | None]:
        """The joined tensors; empty if the parts have not as many as expected."""
        if not len(self.ways) == len(halves[0]) == len(halves[1]):
            return []
        sizes = (first, self.tried.stop - self.tried.start - first)
        return [joined(way, (one, other), sizes) for way, one, other in zip(self.ways, *halves, strict=True)]


class Trial:
    """Finds how the outputs of the global batch are combined from parts. Errors of the forward are not raised."""

    def __init__(
        self,
        rank: int,
        whole_batch: Callable[[], AbstractContextManager[None]],
        *,
        trusted: bool,
        anywhere: bool,
    ) -> None:
        """``anywhere``: samples may be in another dimension of the inputs than the first, and what the forward keeps
        beside its outputs can be joined, too.
        """
        self._rank, self._whole_batch, self._trusted, self._anywhere = rank, whole_batch, trusted, anywhere
        self._keeps = anywhere and not trusted
        self.follows_packing = True

    def __call__(self, forward: Call, module: nn.Module, inputs: Any, share: BatchShard, dims: Dims) -> Found | Refused:
        """``inputs``: positional and keyword arguments; ``dims``: the dimensions of their samples."""
        if any(tensor.layout not in (torch.strided, torch.jagged) for tensor in tensors_in(inputs)):
            return Refused("it is given a sparse tensor (edges of a graph?), whose rows are not samples of a batch")
        if (observer := _observer(module)) is not None:
            return Refused(f"{observer} observes the range of values in whole batches, for quantisation")
        forward = opening(forward)
        low, high = at_least_two(share)
        size = high - low
        part_args, part_kwargs = narrowed(inputs, dims, low, high)
        entered = {
            part: dim for part, dim in zip(tensors_in((part_args, part_kwargs)), dims, strict=True) if dim is not None
        }
        tracker, seen = BatchwiseTracker(), _Seen()
        try:
            with no_trace(module) as belongings, undone(), OwnStream(self._rank), torch.enable_grad():
                before = {name: buffer.clone() for name, buffer in module.named_buffers()}
                follows = packing.followed(tracker) if self.follows_packing else contextlib.nullcontext()
                with tracker, follows, self._whole_batch():
                    for part, dim in entered.items():
                        tracker.enters(part, size, dim)
                    outputs = forward(*part_args, **part_kwargs)
                    seen.buffer = changed_buffer(module, before, tracker)
                weights = belongings.weights.current().items()
                seen.weight = next((name for name, one in weights if not isinstance(tracker.kind(one), Same)), None)
                made = tensors_in(outputs)
                ways = [self._way(tracker.fact(tensor), tensor, size) for tensor in made]
                held = sum(tensor.nbytes for tensor in (*entered, *made)) / size
                left = belongings.left() if self._keeps else []
                places, kept = self._kept(left, tracker, made, size)
                others = frozenset(one.where for one in left) - places
                del outputs, made, left
                belongings.restore()
                seen.kept = kept_beside(tracker, [*entered, *module.buffers()])
            refusal = next((way for way in kept if isinstance(way, Refused)), None)
            if refusal is not None:
                places, kept = frozenset(), []
            tried = window(share, held)
            joins = _Joins([*ways, *kept], places, tried)
            asked, behind = _Asked(forward, module, inputs, dims), list[Left]()
            seen.differ = self._halves_differ(asked, joins, seen, behind)
            if self._goes_on(asked, _Joins(ways, places, tried), behind):
                seen.goes_on = min(places, default="")
        except StrategyError as error:
            return Refused(error.message)
        except Exception as error:  # noqa: BLE001  # the user's forward may raise anything on fewer samples
            recover(module)
            self._raise_own(type(error), forward, module, inputs)
            why = _likely_cause(module, list(entered), tensors_in(inputs), share.total)
            return Refused(
                f"with {size} of the {share.total} samples it raises {type(error).__name__}: {error} ({why}?)"
            )
        if refusal is not None:
            return refusal
        said = "" if self._trusted else seen.refusal(tracker.branch)
        if said:
            return Refused(said)
        refusal = next((way for way in ways if isinstance(way, Refused)), None)
        return refusal or Found(_only_ways(ways), places, _only_ways(kept), others, seen.counts)

    def _raise_own(self, kind: type[Exception], forward: Call, module: nn.Module, inputs: Any) -> None:
        """Raise what the forward raises with the whole batch, if it is such an error: a mistake in the model."""
        try:
            with no_trace(module), undone(), self._whole_batch(), torch.enable_grad():
                forward(*inputs[0], **inputs[1])
        except Exception as error:
            recover(module)
            if type(error) is kind:
                raise error from None

    def _kept(
        self, left: Sequence[Left], tracker: BatchwiseTracker, made: Sequence[torch.Tensor], size: int
    ) -> tuple[frozenset[str], list[Way | Refused]]:
        """Where the forward keeps tensors of its samples, and how those that are no outputs are joined."""
        places = {
            one.where
            for one in left
            if not all(isinstance(tracker.kind(tensor), Same | Noise) for tensor in tensors_in(one.value))
        }
        ways: list[Way | Refused] = []
        for one in left:
            if one.where in places:
                for tensor in new_tensors(one.value, made := [*made]):
                    made.append(tensor)
                    way = self._way(tracker.fact(tensor), tensor, size)
                    if isinstance(way, Refused):
                        way = Refused(f"it keeps {_shape(tensor)} of the batch in {one.where}: {way.reason}")
                    elif isinstance(tracker.kind(tensor), Noise):
                        way = Refused(f"it keeps random numbers in {one.where}, which differ between the ranks")
                    ways.append(way)
        return frozenset(places), ways

    @contextlib.contextmanager
    def _run(self, asked: _Asked, tried: Window, low: int, high: int, lengths: list[int]) -> Iterator[_Ran]:
        """Run the samples from ``low`` to ``high``; what the forward leaves is undone at the end."""
        args, kwargs = narrowed(asked.inputs, asked.dims, low, high)
        is_whole = high - low == tried.stop - tried.start
        padded = packing.Padded(packing.noting(lengths) if is_whole else packing.as_noted(lengths))
        with no_trace(asked.module) as belongings, without_chance(asked.module), self._whole_batch(), padded:
            yield _Ran(asked.forward(*args, **kwargs), belongings, is_whole)

    def _halves_differ(self, asked: _Asked, joins: _Joins, seen: _Seen, behind: list[Left]) -> bool:
        """Whether a run in halves disproves the result.

        Adds the notes of the undivided run and of the parts to ``seen``, and what the undivided run leaves to
        ``behind``. Every rank runs it, whatever it has found: the forward of a sharded model communicates.
        """
        lengths: list[int] = []

        def outputs(low: int, high: int) -> Any:
            with self._run(asked, joins.tried, low, high, lengths) as ran:
                left, changed = ran.belongings.left(), ran.belongings.changed()
                behind.extend(left if ran.is_whole else [])
                seen.notes.append(_notes(ran, changed, left, joins.places))
                seen.integers.append({one.where: one.value for one in left if type(one.value) is int})
                seen.buffers.append(_own_buffers(asked.module, changed))
                kept = [one.value for one in left if one.where in joins.places]
                known = tensors_in(ran.made)
                for value in kept:
                    known += new_tensors(value, known)
                return known

        return halves_differ(outputs, joins.tried, joins.join)

    def _goes_on(self, asked: _Asked, joins: _Joins, behind: Sequence[Left]) -> bool:
        """Whether a forward reads what the one before it has kept ``behind`` of the same samples (hidden states).

        A rank's next forward finds there what was joined for the whole batch, and has fewer samples.
        """
        if not self._keeps or not any(tensors_in(one.value) for one in behind):
            return False
        lengths: list[int] = []
        whole_ran = False

        def outputs(low: int, high: int) -> Any:
            nonlocal whole_ran
            with self._run(asked, joins.tried, low, high, lengths) as ran:
                whole_ran = True
                return tensors_in(ran.made)

        with no_trace(asked.module):
            for one in behind:
                if one.where in joins.places or not tensors_in(one.value):
                    one.put(one.value)
            try:
                return halves_differ(outputs, joins.tried, joins.join)
            except Exception:  # noqa: BLE001  # the user's forward may raise anything on fewer samples
                return whole_ran  # else the cell does something between two forwards, which is not done here

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
            return Refused(f"{kind.operation} {kind.why}{where}", doubted=isinstance(kind, Unknown))
        if isinstance(kind, Noise):
            return Refused("an output is computed from random numbers alone, and each rank draws its own")
        return Refused("an output is a weighted mean, or not in the order of the samples")


def _notes(ran: _Ran, changed: dict[str, Any], left: Sequence[Left], places: Collection[str]) -> dict[str, Any]:
    """What a forward leaves, to be compared; without the tensors in ``places``, which are joined."""
    own = {name: one for name, one in changed.items() if is_number(one)}
    noted = ran.belongings.noted()
    noted |= {name: map_parts(one, torch.Tensor, lambda _tensor: None) for name, one in noted.items() if name in places}
    same = [one for one in left if one.where not in places and isinstance(one.value, torch.Tensor)]
    fixed = {f"{_FIXED}{one.where}|{list(one.value.shape)}": one.value for one in same if one.where not in noted}
    weights = {_WEIGHT + name: one for name, one in ran.belongings.weights.changes().items()}
    return noted | own | fixed | weights | {_NUMBERS: numbers_in(ran.made)}


def _own_buffers(module: nn.Module, changed: dict[str, Any]) -> dict[str, Any]:
    """The buffers among what has ``changed``, but for those of normalisation, which takes the global batch."""
    norms = [name for name, part in module.named_modules() if isinstance(part, NormBase)]
    mine = {name: changed[name] for name, _ in module.named_buffers() if name in changed}
    return {name: one for name, one in mine.items() if name.rpartition(".")[0] not in norms}


def _other(some: dict[str, Any], others: dict[str, Any]) -> str | None:
    """The first place where notes differ. Tensors are compared where they have one shape for all numbers of samples."""
    one, other = (
        {name: value for name, value in mine.items() if name in its or not name.startswith(_FIXED)}
        for mine, its in ((some, others), (others, some))
    )
    found = other_notes(one, other)
    return None if found is None else found.removeprefix(_FIXED).partition("|")[0]


def new_tensors(value: Any, known: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in ``value`` that are not ``known``, each once."""
    ours = set(map(id, known))
    return list({id(tensor): tensor for tensor in tensors_in(value) if id(tensor) not in ours}.values())


def _observer(module: nn.Module) -> str | None:
    """The first part of a model that observes values for quantisation; None if there is none, or none observes now."""
    for name, part in module.named_modules():
        if any(kind.__module__.startswith(_OBSERVING) for kind in type(part).__mro__):
            enabled = getattr(part, "observer_enabled", None)
            if enabled is None or bool(enabled.any()):
                return str(name)
    return None


def _only_ways(ways: Sequence[Way | Refused]) -> tuple[Way, ...]:
    return tuple(way for way in ways if not isinstance(way, Refused))


def _shape(tensor: torch.Tensor) -> str:
    return f"a tensor of shape {list(tensor.shape)}"


def _likely_cause(module: nn.Module, cut: Sequence[torch.Tensor], given: Sequence[torch.Tensor], samples: int) -> str:
    """The most common cause of a failure on fewer samples."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if not name.startswith("_") and any(samples in tensor.shape for tensor in tensors_in(value)):
                return f"does it read what {path}{'.' if path else ''}{name} holds for the whole batch"
    if all(tensor.dim() == 1 for tensor in cut):
        return "is it given one sample, without a batch"
    if any(tensor.dim() > 1 and samples in tensor.shape[1:] and tensor.size(0) != samples for tensor in given):
        return "is the batch not the first dimension, as in the hidden states of an LSTM"
    return "is a batch size written in the model as a number, or is the batch not the first dimension"
