"""Whether and how a loss that was recorded over the whole batch can be computed for each microbatch.

``batchwise`` decides it: it follows the recorded functions once, with the values of a trial, and finds whether the loss
is a mean or a sum over the samples. Then values and gradients of the parts are compared with the whole batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..analysis.batchwise import BatchwiseTracker
from ..analysis.divisors import Parted, divisor_of
from ..analysis.rules import IGNORED
from ..analysis.verdicts import judged
from ..loop.watching import way_of
from ..step.deferred import Deferred, External, Node, OperationRecord, Ref, mapped
from ..step.ways import AddedParts, JoinedRows, Way
from .flow import OTHER_LOSS

_MOST_ASSIGNMENTS = 16
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative rounding error that a sum in another order may have, by dtype; 2 % in half precision."""


@dataclass(frozen=True)
class Graph:
    """The operations from a model's outputs to a loss. ``externals``: all of the record; only ``used`` are needed."""

    nodes: tuple[Node, ...]
    loss: int
    outputs: tuple[int, ...]
    """The outputs that the loss depends on."""
    externals: tuple[Tensor, ...]
    used: tuple[int, ...]

    def value(self, outputs: Sequence[Tensor], externals: Sequence[Tensor]) -> Tensor:
        """The loss for these outputs."""
        values = dict(enumerate(outputs))
        for node in self.nodes:
            node.run(values, externals)
            if _smooths(node):
                _note_divisor(node, values, externals)
        return values[self.loss]

    def signature(self, total: int) -> Hashable:
        """Equal for graphs that need only one proof."""

        kinds = [
            (place, one.dim(), one.dim() > 0 and one.size(0) % total == 0, one.dtype)
            for place in self.used
            for one in (self.externals[place],)
        ]
        steps = [(node.function, repr((node.args, node.kwargs)), node.graded, node.autocast) for node in self.nodes]
        return (tuple(steps), self.loss, tuple(kinds))


@dataclass(frozen=True)
class Parts:
    """How a loss is made of the microbatches' losses, and which externals are cut by rows."""

    way: AddedParts
    cut: frozenset[int]

    def externals(self, graph: Graph, rows: slice, total: int) -> list[Tensor]:
        """The external tensors for one microbatch."""
        return [_rows(one, rows, total) if place in self.cut else one for place, one in enumerate(graph.externals)]


def _smooths(node: Node) -> bool:
    """Whether it is a mean cross entropy with label smoothing: several sums that all ignore the same targets."""
    if node.function is not F.cross_entropy or not node.kwargs.get("label_smoothing"):
        return False
    return all(node.kwargs.get(name) in (None, "mean") for name in ("size_average", "reduce", "reduction"))


def _sharp(node: Node) -> Node:
    """The node without label smoothing: other values, but from the same samples."""
    return replace(node, kwargs=node.kwargs | {"label_smoothing": 0.0}) if _smooths(node) else node


def _note_divisor(node: Node, values: dict[int, Tensor], externals: Sequence[Tensor]) -> None:
    """Record the divisor of the mean, from ``nll_loss``, which needs no softmax. Probability targets have none."""
    target = node.args[1]
    if (externals[target.place] if isinstance(target, External) else values[target.number]).is_floating_point():
        return
    (number,), plain = node.numbers, dict(values)
    kwargs = {name: node.kwargs[name] for name in ("weight", "ignore_index") if name in node.kwargs}
    replace(node, function=F.nll_loss, kwargs=kwargs).run(plain, externals)
    values[number] = Parted.of(values[number], divisor_of(plain[number]), ())


def graph_of(record: OperationRecord, loss: Deferred, outputs: int) -> Graph:
    """The part of a record that the loss depends on. ``outputs``: the number of the model's outputs."""
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
    """How microbatch losses give the batch's loss, or why they do not. ``outputs``: outputs of the whole batch."""
    reason = ""
    for cut in itertools.islice(_assignments(graph, rows[-1].stop), _MOST_ASSIGNMENTS):
        found = _followed(graph, outputs, ways, cut, rows[-1].stop)
        if isinstance(found, AddedParts):
            # A torch function may divide its sum by a size inside (cross entropy with probability targets).
            for way in (found,) if found.mean else (found, AddedParts(mean=True)):
                if _holds(graph, parts := Parts(way, cut), outputs, ways, rows):
                    return parts
            found = "its value or its gradient is not the sum or mean of those of the microbatches"
        reason = reason or found
    return reason


def _assignments(graph: Graph, total: int) -> Iterator[frozenset[int]]:
    """Sets of externals that may have one or more rows for each sample: first all candidates, then fewer."""
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
    """The tracker's result for the loss: how parts are added, or the reason why not."""
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
        # Recorded numbers are constants, even if one equals the batch size, so none of them is suspect.
        verdict = judged(replace(tracker.fact(loss), suspects=frozenset()), loss)
        counted = any(_counted(ways[number]) for number in graph.outputs)
        found = way_of(loss, verdict, counted=counted)
        if found is not None and found.counted and divisor_of(loss) is None:
            return "it adds a term to a mean over targets, and the microbatches have different numbers of targets"
    if found is None and IGNORED in verdict.notes:
        return "it adds several cross entropies, and each of them may ignore different targets"
    return found or verdict.reason  # without the place: it would be a line of this package


def _counted(way: Way) -> bool:
    return isinstance(way, AddedParts) and way.counted


def _holds(graph: Graph, parts: Parts, outputs: Sequence[Tensor], ways: Sequence[Way], rows: Sequence[slice]) -> bool:
    """Whether values and gradients of the parts match the whole batch. Losses inside the model are not compared."""
    if any(isinstance(ways[number], AddedParts) for number in graph.outputs):
        return True
    whole, slopes = _with_slopes(graph, outputs, graph.externals)
    total, values, weights, parted = rows[-1].stop, [], [], []
    for part in rows:
        cut = [_part_of(one, way, part, total) for one, way in zip(outputs, ways, strict=True)]
        loss, own = _with_slopes(graph, cut, parts.externals(graph, part, total))
        weights.append(float(weight_of(loss, parts.way, part, total)))
        none_counts = weights[-1] == 0  # all targets of the part are ignored: 0 / 0
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
    """The weight of a microbatch's loss. A mean must be divided by the sum of all weights."""
    if not way.mean:
        return 1.0
    if not way.counted:
        return float(rows.stop - rows.start) / total
    if (divisor := divisor_of(loss)) is None:
        raise OTHER_LOSS
    return divisor.double()


def _part_of(output: Tensor, way: Way, rows: slice, total: int) -> Tensor:
    if not isinstance(way, JoinedRows):
        return output
    each = output.size(way.dim) // total
    return output.narrow(way.dim, rows.start * each, (rows.stop - rows.start) * each)


def _with_slopes(graph: Graph, outputs: Sequence[Tensor], externals: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The loss, and its gradients with respect to all outputs."""
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
