"""A loss that was recorded over the whole batch, computed microbatch by microbatch: may it be, and how.

What says so is ``batchwise``: the recorded functions are followed once with the values of a trial, as a mean or a sum
over the samples or as neither. Then the parts' values and slopes are held against the whole's.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...protocol.errors import StrategyError
from ..analysis.batchwise import BatchwiseTracker
from ..analysis.divisors import Parted, divisor_of
from ..analysis.rules import IGNORED
from ..analysis.verdicts import judged
from ..loop.watching import way_of
from ..step.deferred import Deferred, External, Node, OperationRecord, Ref, mapped
from ..step.ways import AddedParts, JoinedRows, Way

_MOST_ASSIGNMENTS = 16
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Rounding that a sum in another order may have, by type; in half precision 2 %."""


@dataclass(frozen=True)
class Graph:
    """From a model's outputs to a loss. ``externals``: all of the record, of which ``used`` take part."""

    nodes: tuple[Node, ...]
    loss: int
    outputs: tuple[int, ...]
    """Those that take part."""
    externals: tuple[Tensor, ...]
    used: tuple[int, ...]

    def value(self, outputs: Sequence[Tensor], externals: Sequence[Tensor]) -> Tensor:
        """The loss of these outputs."""
        values = dict(enumerate(outputs))
        for node in self.nodes:
            node.run(values, externals)
            if _smooths(node):
                _note_divisor(node, values, externals)
        return values[self.loss]

    def signature(self, total: int) -> Hashable:
        """Equal for graphs of which one proof speaks for all."""

        kinds = [
            (place, one.dim(), one.dim() > 0 and one.size(0) % total == 0, one.dtype)
            for place in self.used
            for one in (self.externals[place],)
        ]
        steps = [(node.function, repr((node.args, node.kwargs)), node.graded, node.autocast) for node in self.nodes]
        return (tuple(steps), self.loss, tuple(kinds))


@dataclass(frozen=True)
class Parts:
    """How a loss is made of those of microbatches, and which externals are cut with the rows."""

    way: AddedParts
    cut: frozenset[int]

    def externals(self, graph: Graph, rows: slice, total: int) -> list[Tensor]:
        """What came from elsewhere, for one microbatch."""
        return [_rows(one, rows, total) if place in self.cut else one for place, one in enumerate(graph.externals)]


def _smooths(node: Node) -> bool:
    """A mean over targets that torch makes of several sums, which all leave out the same targets."""
    if node.function is not F.cross_entropy or not node.kwargs.get("label_smoothing"):
        return False
    return all(node.kwargs.get(name) in (None, "mean") for name in ("size_average", "reduce", "reduction"))


def _sharp(node: Node) -> Node:
    """Without smoothing: another number for each sample, of the same samples."""
    return replace(node, kwargs=node.kwargs | {"label_smoothing": 0.0}) if _smooths(node) else node


def _note_divisor(node: Node, values: dict[int, Tensor], externals: Sequence[Tensor]) -> None:
    """That of the mean without smoothing, for which no softmax is needed; targets that are shares have none."""
    target = node.args[1]
    if (externals[target.place] if isinstance(target, External) else values[target.number]).is_floating_point():
        return
    (number,), plain = node.numbers, dict(values)
    kwargs = {name: node.kwargs[name] for name in ("weight", "ignore_index") if name in node.kwargs}
    replace(node, function=F.nll_loss, kwargs=kwargs).run(plain, externals)
    values[number] = Parted.of(values[number], divisor_of(plain[number]), ())


def graph_of(record: OperationRecord, loss: Deferred, outputs: int) -> Graph:
    """What of a record leads to the loss of a model with so many outputs."""
    wanted = {loss.number}
    nodes: list[Node] = []
    used: set[int] = set()
    for node in reversed(record.nodes):
        if wanted & set(node.numbers):
            nodes.append(node)
            parts: list[Any] = []
            mapped((node.args, node.kwargs), parts.append)
            wanted |= {part.number for part in parts if isinstance(part, Ref)}
            used |= {part.place for part in parts if isinstance(part, External)}
    return Graph(
        tuple(reversed(nodes)),
        loss.number,
        tuple(number for number in range(outputs) if number in wanted),
        tuple(record.externals),
        tuple(sorted(used)),
    )


def proved(graph: Graph, outputs: Sequence[Tensor], ways: Sequence[Way], rows: Sequence[slice]) -> Parts | str:
    """How the losses of microbatches make the batch's, or why they do not. ``outputs``: of the whole batch."""
    reason = ""
    for cut in itertools.islice(_assignments(graph, rows[-1].stop), _MOST_ASSIGNMENTS):
        found = _followed(graph, outputs, ways, cut, rows[-1].stop)
        if isinstance(found, AddedParts):
            # A function of torch's may divide its sum by a size that nothing shows (of targets that are shares).
            for way in (found,) if found.mean else (found, AddedParts(mean=True)):
                if _holds(graph, parts := Parts(way, cut), outputs, ways, rows):
                    return parts
            found = "its value or its gradient is not the sum or mean of those of the microbatches"
        reason = reason or found
    return reason


def _assignments(graph: Graph, total: int) -> Iterator[frozenset[int]]:
    """Which externals may have a row (or several) for each sample: first all that could, then fewer."""
    could = [
        place for place in graph.used for one in (graph.externals[place],) if one.dim() and one.size(0) % total == 0
    ]
    for fewer in range(len(could) + 1):
        for left in itertools.combinations(could, fewer):
            yield frozenset(could) - frozenset(left)


def _rows(tensor: Tensor, rows: slice, total: int) -> Tensor:
    each = tensor.size(0) // total
    return tensor[rows.start * each : rows.stop * each]


def _followed(
    graph: Graph, outputs: Sequence[Tensor], ways: Sequence[Way], cut: frozenset[int], total: int
) -> AddedParts | str:
    """What the tracker says of the loss."""
    tracker, graph = BatchwiseTracker(total=total), replace(graph, nodes=tuple(map(_sharp, graph.nodes)))
    leaves = [one.detach().requires_grad_(one.is_floating_point()) for one in outputs]
    externals = [one.detach() for one in graph.externals]
    with torch.enable_grad(), tracker:
        tracker.enters((), total)
        for place, (leaf, way) in enumerate(zip(leaves, ways, strict=True)):
            if isinstance(way, JoinedRows):
                tracker.returned(leaf, total, way.dim)
            elif isinstance(way, AddedParts):
                tracker.reduced(leaf, total, mean=way.mean)
                leaves[place] = Parted.of(leaf, torch.ones(()), ()) if way.counted else leaf
        for place in cut:
            tracker.returned(externals[place], total, 0)
        loss = graph.value(leaves, externals)
        # A number in what was recorded stays what it was, whether it is a size of the batch or not: none is suspect.
        verdict = judged(replace(tracker.fact(loss), suspects=frozenset()), loss)
        counted = any(_counted(ways[number]) for number in graph.outputs)
        found = way_of(loss, verdict, counted=counted)
        if found is not None and found.counted and divisor_of(loss) is None:
            return "it adds a term to a mean over targets, and the microbatches have different numbers of targets"
    if found is None and IGNORED in verdict.notes:
        return "it adds several cross entropies, and each of them may ignore different targets"
    return found or verdict.reason  # where that is, is a line of ours: the loss is recorded


def _counted(way: Way) -> bool:
    return isinstance(way, AddedParts) and way.counted


def _holds(graph: Graph, parts: Parts, outputs: Sequence[Tensor], ways: Sequence[Way], rows: Sequence[slice]) -> bool:
    """Values and slopes of the whole and of its parts. Of losses within the model there are no parts to be held."""
    if any(isinstance(ways[number], AddedParts) for number in graph.outputs):
        return True
    whole, slopes = _with_slopes(graph, outputs, graph.externals)
    total, values, weights, parted = rows[-1].stop, [], [], []
    for part in rows:
        cut = [_part_of(one, way, part, total) for one, way in zip(outputs, ways, strict=True)]
        loss, own = _with_slopes(graph, cut, parts.externals(graph, part, total))
        weights.append(float(weight_of(loss, parts.way, part, total)))
        none_counts = weights[-1] == 0  # all targets of the part are to be ignored: 0 / 0
        values.append(0.0 if none_counts else float(loss.detach()))
        parted.append([torch.zeros_like(slope) for slope in own] if none_counts else own)
    divisor = sum(weights) if parts.way.mean else 1.0
    value = sum(value * weight for value, weight in zip(values, weights, strict=True)) / divisor
    if not _alike(torch.tensor(value, dtype=torch.float64), whole.detach().cpu(), whole.dtype):
        return False
    for number in graph.outputs:
        way = ways[number]
        if isinstance(way, JoinedRows):
            pieces = [own[number] * (weight / divisor) for weight, own in zip(weights, parted, strict=True)]
            if not _alike(torch.cat(pieces, way.dim), slopes[number], outputs[number].dtype):
                return False
    return True


def weight_of(loss: Tensor, way: AddedParts, rows: slice, total: int) -> float | Tensor:
    """What a microbatch's loss counts with; means are to be divided by the sum of their weights."""
    if not way.mean:
        return 1.0
    if not way.counted:
        return float(rows.stop - rows.start) / total
    if (divisor := divisor_of(loss)) is None:
        raise StrategyError("the loss was a cross entropy in the first steps and is none now")
    return divisor.double()


def _part_of(output: Tensor, way: Way, rows: slice, total: int) -> Tensor:
    if not isinstance(way, JoinedRows):
        return output
    each = output.size(way.dim) // total
    return output.narrow(way.dim, rows.start * each, (rows.stop - rows.start) * each)


def _with_slopes(graph: Graph, outputs: Sequence[Tensor], externals: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The loss, and its slopes to all outputs."""
    leaves = [one.detach().requires_grad_(one.is_floating_point()) for one in outputs]
    with torch.enable_grad():
        loss = graph.value(leaves, externals)
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(torch.autograd.grad(loss, asked, allow_unused=True, retain_graph=True))
    slopes = [next(found) if leaf.requires_grad else None for leaf in leaves]
    return loss, [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, slopes, strict=True)]


def _alike(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    close = _CLOSE.get(dtype, 2e-2)
    scale = float(theirs.abs().max()) if theirs.numel() else 0.0
    return torch.allclose(ours.to(theirs.dtype), theirs, rtol=close, atol=close * scale, equal_nan=True)
