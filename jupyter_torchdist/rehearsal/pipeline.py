"""The memory of each rank of a pipeline, from a rehearsal that runs all stages one after the other.

Every storage belongs to the stage and the microbatch whose unit created it, in the forward or in the backward. Storages
that no unit created are on all ranks (the joined outputs, the loss). A rank's memory is the log without the storages of
other ranks. The rehearsal runs in the order of GPipe: all forwards, then all backwards from the last microbatch on. For
a schedule that mixes both, the rank's part of the log is sorted into the order of its actions. The last microbatch then
stands for the first one, because its backward ran first.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.flop_counter import flop_registry

from ..protocol.options.strategy import chosen
from ..strategies.core.context import ParallelContext
from ..strategies.core.scatter import map_tensors, tensors_in
from ..strategies.parallel.fsdp import DTYPES
from ..strategies.pipeline import checks
from ..strategies.pipeline.schedules import WHOLE_FORWARD, Kind, StageLayout, stages_a_rank
from ..strategies.pipeline.units import Units, assigned, marked, measured
from ..torch_private.places import TorchDispatchMode
from .allocations import Allocations
from .fakes import NotRehearsed

RUN = 3
"""Largest number of microbatches that are run: the first, the last, and one that stands for all others."""


class _Owner(NamedTuple):
    """``passage``: number of the model's forward. ``backward``: whether it is the backward of that forward."""

    stage: int
    microbatch: int
    passage: int
    backward: bool = False

    @property
    def part(self) -> tuple[int, int, int]:
        return self.stage, self.microbatch, self.passage


class Stages:
    """The stages of a model, and the owner of each storage in ``log``."""

    def __init__(self, root: nn.Module, context: ParallelContext, log: Allocations) -> None:
        """``context``: with the complete plan. Raises ``StrategyError`` if a pipeline does not support the model."""
        checks.check(root, context)
        schedule, ranks = chosen(context.plan, "schedule"), context.plan.degree("pp")
        balance = chosen(context.plan, "balance")
        self.layout = StageLayout(schedule, ranks, ranks * stages_a_rank(schedule, ranks, balance, marked(root)))
        self._context, self._log, self._balance = context, log, balance
        self._units = Units(root, self.layout.stages)
        self._stage_of: list[int] = []
        self._stages: dict[Tensor, set[int]] = {}
        self._calls = 0
        self._microbatches = 1
        self._arrived: dict[int, tuple[Tensor, Tensor]] = {}
        self._graded: set[int] = set()
        """Stages whose inputs have gradients. Other stages have no first half of a split backward."""
        self._branching: set[int] = set()
        """Storages of the gradients that the second half of a split backward needs."""
        self._of_weights: set[int] = set()
        """Storages that the second half creates: gradients of parameters."""
        self.passage = 0
        self._owners: list[_Owner | None] = [None]
        self._since: list[int] = [0]
        """For each of ``_owners``: the number of its first storage."""
        self._positions: list[int] = [0]
        """For each of ``_owners``: the position in the log where it begins."""

    # ------------------------------------------------------------------------------------------------------ the step

    def forward(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> Any:
        """The outputs of a batch of ``rows`` samples, computed microbatch by microbatch."""
        dtype = DTYPES.get(self._context.plan.precision)
        precision = nullcontext() if dtype is None else torch.autocast(self._context.device.type, dtype)
        self._microbatches = max(1, min(checks.microbatches(self._context), rows))
        size = -(-rows // self._microbatches)
        self.passage += 1
        found = []
        for number in range(min(self._microbatches, RUN)):
            part = partial(_part, rows=rows, begin=min(number * size, rows - size), size=size)
            run = partial(forward, *map_tensors(args, part), **map_tensors(kwargs, part))
            if not self._stage_of:
                self._decide(run)
            self.own(_Owner(0, number, self.passage))
            self._calls = 0
            with precision, self._units.run_by(self):
                found.append(run())
            self._arrived.clear()
        self.own(None)
        each = [tensors_in(outputs) for outputs in found]
        whole = iter([self._joined(parts, size, rows) for parts in zip(*each, strict=True)])
        return map_tensors(found[0], lambda _: next(whole))

    def own(self, owner: _Owner | None) -> None:
        """Storages created from now on belong to ``owner``; None: to all ranks."""
        if self._owners[-1] != owner:
            self._owners.append(owner)
            self._since.append(self._log.next_number)
            self._positions.append(self._log.position)

    def unit(self, number: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Implements ``Runner``."""
        if self._calls == len(self._stage_of):
            raise NotRehearsed("its model calls its layers in an order that changes between microbatches")
        before = self._owners[-1]
        assert before is not None
        owner = before._replace(stage=self._stage_of[self._calls])
        self._calls += 1
        args, kwargs = map_tensors((args, kwargs), partial(self._received, owner=owner))
        self.own(owner)
        outputs = original(*args, **kwargs)
        graded = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        for tensor in graded:
            tensor.register_hook(partial(self._backward, owner._replace(backward=True)))
        if self.mixes:
            inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
            branching, of_weights = _split(graded, inputs)
            for node in branching:
                node.register_prehook(partial(self._note, self._branching))
            for node in of_weights:
                node.register_prehook(partial(self._note, self._of_weights))
        return outputs

    def _decide(self, forward: Callable[[], Any]) -> None:
        """Choose the stage of each call. A job measures the time of layers; the rehearsal counts their operations."""
        with _Operations() as operations:
            costs = measured(self._units, lambda: operations.done, forward, rounds=1)
        self._stage_of = assigned(self._units, costs, self.layout.stages, self._balance)
        for cost, stage in zip(costs, self._stage_of, strict=True):
            for parameter in self._units.modules[cost.unit].parameters():
                self._stages.setdefault(parameter, set()).add(stage)

    def _received(self, tensor: Tensor, owner: _Owner) -> Tensor:
        """A tensor from another stage is copied into new memory, while the sender keeps its own copy."""
        made = self._owner_of(self._log.number(tensor))
        if made is None or made.stage >= owner.stage:
            return tensor
        if tensor.requires_grad:
            self._graded.add(owner.stage)
        if id(tensor) not in self._arrived:
            self.own(owner)
            self._arrived[id(tensor)] = tensor, _Sent.apply(tensor, self, made)  # type: ignore[no-untyped-call]
        return self._arrived[id(tensor)][1]

    def _backward(self, owner: _Owner, _grad: Tensor) -> None:
        self.own(owner)

    def _note(self, among: set[int], grads: Iterable[Tensor | None]) -> None:
        among.update(number for grad in grads if grad is not None for number in self._log.number(grad))

    def _joined(self, parts: tuple[Tensor, ...], size: int, rows: int) -> Tensor:
        """One output for the whole batch, on all ranks."""
        first = parts[0]
        if first.dim() and first.size(0) % size == 0:
            whole: Tensor = _Joined.apply(self, rows * (first.size(0) // size), *parts)  # type: ignore[no-untyped-call]
            return whole
        return torch.stack(parts).mean() if not first.dim() and first.is_floating_point() else first

    def _stands_for(self, number: int) -> int:
        """How many microbatches this one counts for: number 1 stands for all except the first and the last."""
        return self._microbatches - RUN + 1 if number == 1 and self._microbatches > RUN else 1

    # ----------------------------------------------------------------------------------------------- what a rank holds

    def ranks_of(self, parameter: Tensor) -> set[int]:
        """Ranks along ``pp`` that hold a parameter. Parameters outside all units belong to the first stage."""
        return {self.layout.rank_of(stage) for stage in self._stages.get(parameter, {0})}

    def weight(self, rank: int) -> Callable[[int], float]:
        """A function of a storage's number: how much of the storage is on this rank of ``pp``.

        If the schedule mixes forwards and backwards, only memory outside them counts, and gradients.
        """

        def weight(number: int) -> float:
            interval = self._made_in(number)
            owner = self._owners[interval]
            if self.mixes and (self._is_of_the_loss(interval) if owner is None else not owner.backward):
                return 0.0
            if owner is None or owner.backward:
                return float(owner is None or self.layout.rank_of(owner.stage) == rank)
            return float(self.layout.rank_of(owner.stage) == rank) * self._stands_for(owner.microbatch)

        return weight

    def mixed(self, rank: int, before: Callable[[int], int]) -> tuple[int, int]:
        """(peak bytes, peak bytes of activations) of a rank in its last passage. (0, 0) if the schedule does not mix.

        ``before``: function that gives the bytes at a position of the log.
        """
        last = max((owner.passage for owner in self._owners if owner is not None and owner.backward), default=0)
        if not self.mixes or not last:
            return 0, 0
        changes, late = self._changes(rank, last)
        began = next(place for place, owner in enumerate(self._owners) if owner is not None and owner.passage == last)
        now = most = before(self._positions[began])
        kept = most_kept = 0
        put_off: dict[tuple[int, int], list[int]] = {}
        for action in self.layout.inside(self._microbatches)[rank]:
            stage, number = action.stage, self._run_as(action.microbatch)
            if action.kind is Kind.INPUTS and stage not in self._graded:
                continue
            part, work = (stage, action.microbatch), changes[stage, number, action.kind is not Kind.FORWARD]
            made_in_forward = sum(change for _, change in changes[stage, number, False])
            if action.kind is Kind.FORWARD:
                kept += made_in_forward
                most_kept = max(most_kept, kept)
                steps = [change for _, change in work]
            elif action.kind is Kind.INPUTS:
                steps, put_off[part] = self._halves(work)
            else:
                kept -= made_in_forward
                steps = [*put_off.pop(part, [change for _, change in work]), late[stage, number]]
            if stage == self.layout.stages - 1 and action.kind in (Kind.INPUTS, Kind.BACKWARD):
                most = max(most, now + self._loss(last))
            for change in steps:
                now += change
                most = max(most, now)
        return most, most_kept

    def _halves(self, work: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """A split backward: (changes in bytes of its first half, changes of its second half).

        The first half keeps the graph, and the gradients that the second half needs. The second half creates the
        gradients of parameters, and then frees all of this.
        """
        first, made, kept = [], [], []
        for number, change in work:
            owner = self._owners[self._made_in(number)]
            if number in self._of_weights:
                made.append(change)
            elif change < 0 and (number in self._branching or owner is None or not owner.backward):
                kept.append(change)
            else:
                first.append(change)
        return first, made + kept

    def _run_as(self, microbatch: int) -> int:
        """The microbatch that was run in its place. The backward of the last one ran first and created gradients."""
        run = min(self._microbatches, RUN)
        if microbatch == self._microbatches - 1:
            return 0
        return max(1, run - 1 - microbatch)

    def _changes(
        self, rank: int, passage: int
    ) -> tuple[defaultdict[tuple[int, int, bool], list[tuple[int, int]]], Counter[tuple[int, int]]]:
        """Log entries of a rank's stages in the forward and the backward of each microbatch, in order.

        The second result is memory freed while other owners were running, that is after the backward.
        """
        changes: defaultdict[tuple[int, int, bool], list[tuple[int, int]]] = defaultdict(list)
        late: Counter[tuple[int, int]] = Counter()
        for interval, at_work in enumerate(self._owners):
            for number, change in self._log.log[self._span(interval)]:
                of = self._owners[self._made_in(number)]
                if of is None or of.passage != passage or self.layout.rank_of(of.stage) != rank:
                    continue
                if at_work is not None and (at_work.part == of.part or _sums(at_work, of)):
                    changes[of.stage, at_work.microbatch, at_work.backward].append((number, change))
                elif at_work is not None or not of.backward or self._is_of_the_loss(interval):  # else it is a gradient
                    late[of.stage, of.microbatch] += change
        return changes, late

    def _loss(self, passage: int) -> int:
        """Peak bytes of the loss of one microbatch."""
        for interval, after in enumerate(self._owners[1:]):
            if self._is_of_the_loss(interval) and after is not None and after.passage == passage:
                span = self._span(interval)
                most = self._log.most(span.start, span.stop, lambda number: self._owners[self._made_in(number)] is None)
                return most // self._microbatches
        return 0

    @property
    def mixes(self) -> bool:
        """Whether backwards begin before all forwards have ended."""
        return self.layout.schedule not in WHOLE_FORWARD and self._microbatches > 1

    def _is_of_the_loss(self, interval: int) -> bool:
        """Whether the interval lies between a forward and its backward."""
        after = self._owners[interval + 1] if interval + 1 < len(self._owners) else None
        return self._owners[interval] is None and after is not None and after.backward

    def _span(self, interval: int) -> slice:
        ends = [*self._positions[interval + 1 : interval + 2], self._log.position]
        return slice(self._positions[interval], ends[0])

    def _made_in(self, number: int) -> int:
        """Index in ``_owners`` of the owner of a storage."""
        return bisect.bisect_right(self._since, number) - 1

    def _owner_of(self, numbers: Iterable[int]) -> _Owner | None:
        return next((self._owners[self._made_in(number)] for number in numbers), None)


def _sums(at_work: _Owner, of: _Owner) -> bool:
    """Whether both are backwards of one stage: a gradient may be freed when another microbatch adds to it."""
    return at_work.stage == of.stage and at_work.backward and of.backward


def _split(outputs: list[Tensor], inputs: list[Tensor]) -> tuple[list[Node], list[Node]]:
    """(branching nodes, leaf nodes) of a graph. From a node on the way to the inputs, branches lead to parameters.

    ``torch.distributed.pipelining`` splits a backward like this ("Zero Bubble Pipeline Parallelism", arXiv 2401.10241).
    """
    ends = {tensor.grad_fn for tensor in inputs}
    to_inputs: dict[Node, bool] = {}
    order: list[Node] = []
    waiting = [(tensor.grad_fn, False) for tensor in outputs]
    while waiting:
        node, left = waiting.pop()
        if node is None or (node in to_inputs and not left):
            continue
        below = [] if node in ends else [one for one, _ in node.next_functions if one is not None]
        if left:
            to_inputs[node] = node in ends or any(to_inputs[one] for one in below)
            order.append(node)
        else:
            to_inputs[node] = False
            waiting.append((node, True))
            waiting.extend((one, False) for one in below)
    leaves = [node for node in order if node not in ends and not node.next_functions]
    branching = [
        node
        for node in order
        if to_inputs[node] and node not in ends and not all(to_inputs[one] for one, _ in node.next_functions if one)
    ]
    return branching, leaves


class _Operations(TorchDispatchMode):
    """Counts the floating point operations of matrix products and attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.done = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if count := flop_registry.get(func._overloadpacket):
            self.done += count(*args, **(kwargs or {}), out_val=result)
        return result


class _Sent(torch.autograd.Function):
    """Sends a tensor from one stage to a later one, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, stages: Stages, sender: _Owner) -> Tensor:
        ctx.stages, ctx.sender, ctx.kept = stages, sender, tensor.detach()
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.stages.own(ctx.sender._replace(backward=True))
        ctx.kept = None
        return grads[0].clone(), None, None


class _Joined(torch.autograd.Function):
    """Joins the outputs of the microbatches: concatenated in the last stage, then sent to all ranks."""

    @staticmethod
    def forward(ctx: Any, stages: Stages, rows: int, *parts: Tensor) -> Tensor:
        ctx.kept, shape = [part.detach() for part in parts], (rows, *parts[0].shape[1:])
        half = parts[0].dtype in (torch.float16, torch.bfloat16)
        whole = parts[0].new_empty(shape, dtype=torch.float32 if half else parts[0].dtype)
        if not stages.mixes:
            stages.own(_Owner(stages.layout.stages - 1, 0, stages.passage))
            whole.copy_(parts[0].new_empty(shape))
            stages.own(None)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kept, ctx.kept = ctx.kept, None
        return None, None, *(grads[0][: part.size(0)].to(part.dtype) for part in kept)


def _part(tensor: Tensor, *, rows: int, begin: int, size: int) -> Tensor:
    return tensor[begin : begin + size] if tensor.dim() and tensor.size(0) == rows else tensor
