"""One rank's work on the microbatches of a passage: forwards and backwards of its stages in a given order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...torch_private.places import stage_backward_input, stage_backward_weight
from ..analysis.divisors import divisor_of
from ..core.scatter import map_tensors, tensors_in
from ..step.views import no_view, no_view_with_gradient
from .contract import StagedModel
from .flow import Flow, Value
from .schedules import Action, Kind, Orders, messages, taken
from .wires import Arriving

Pairs = list[tuple[Tensor, Tensor]]
"""Tensors, each with its gradient."""


@dataclass
class Microbatch:
    """A microbatch: rows of a batch. The rank of the last stage has the ``outputs`` while they are needed."""

    number: int
    rows: slice
    flow: Flow
    inputs: tuple[Any, Any]
    """Positional and named arguments of the forward."""
    outputs: list[Tensor] = field(default_factory=list)
    weights: list[float | Tensor] = field(default_factory=list)
    """The weight of each output in the output of the whole batch."""
    _divisors: list[Tensor | None] = field(default_factory=list)

    def divisor(self, place: int) -> Tensor | None:
        """The divisor of an output that is a cross entropy."""
        return self._divisors[place] if self._divisors else divisor_of(self.outputs[place])

    def let_go(self) -> None:
        """Free the graphs of the outputs, but keep their values."""
        self._divisors = [divisor_of(output) for output in self.outputs]
        self.outputs = [output.detach() for output in self.outputs]

    def tensors(self) -> list[Tensor]:
        """The tensors in the inputs."""
        return tensors_in(self.inputs)


@dataclass
class _Part:
    """What a stage keeps for one microbatch between forward and backward."""

    received: dict[int, Tensor]
    passed: dict[int, Tensor] = field(default_factory=dict)
    pairs: Pairs = field(default_factory=list)
    groups: Any = None
    """Data from the first half of a split backward for the second half."""


class Work:
    """Runs this rank's actions. ``ends``: tensors and gradients that begin the last stage's backward."""

    def __init__(self, pipeline: StagedModel, microbatches: Sequence[Microbatch]) -> None:
        self._pipeline, self._layout, self._wires = pipeline, pipeline.layout, pipeline.wires
        self._microbatches = microbatches
        self._last = self._layout.stages - 1
        self._kept: dict[tuple[int, int], _Part] = {}
        self._mail: dict[Action, list[Tensor]] = {}
        self._orders: Orders = []
        self._arriving: list[Iterator[tuple[int, Action]]] = []
        self._begun: list[deque[tuple[int, Action, list[Arriving]]]] = []
        """For each rank, the receives that were started, in order."""
        self._sent: dict[Action, list[Any]] = {}
        """Sends to other ranks, by the action that needs them."""
        self._done: list[int] = []
        """How many actions each rank has certainly done."""

    def perform(self, orders: Orders, ends: Callable[[Microbatch], Pairs] = lambda one: []) -> None:
        """Run this rank's actions. All ranks of the pipeline must be given the same orders."""
        rank = self._wires.rank
        self._orders, self._done = orders, [0 for _ in orders]
        self._arriving = [messages(self._layout, order, rank) for order in orders]
        self._begun = [deque() for _ in orders]
        for other in range(len(orders)):
            self._begin_to_receive(other, self._wires.ahead)
        for action in orders[rank]:
            if action.kind is Kind.FORWARD:
                self._forward(action)
            else:
                self._backward(action, ends)
        self._wires.flush()
        self._sent.clear()

    # ------------------------------------------------------------------------------------------------- neighbours

    def _take(self, needed: Action, stage: int) -> list[Tensor]:
        """The tensors that an action needs from the neighbouring ``stage``. Earlier messages are kept until needed."""
        rank = self._layout.rank_of(stage)
        while needed not in self._mail:
            self._begin_to_receive(rank, 1)
            done, arrived, tensors = self._begun[rank].popleft()
            self._mail[arrived] = [tensor.arrived() for tensor in tensors]
            self._let_go(rank, done)
            self._begin_to_receive(rank, self._wires.ahead)
        return self._mail.pop(needed)

    def _let_go(self, rank: int, done: int) -> None:
        """Free sends that ``rank`` has received: it has ``done`` so many actions, and received what they needed."""
        for action in taken(self._orders[rank][self._done[rank] : done]):
            for work in self._sent.pop(action, ()):
                self._wires.has_arrived(work)
        self._done[rank] = done

    def _begin_to_receive(self, rank: int, count: int) -> None:
        """Start the next receives from a rank, until ``count`` are in flight."""
        while len(self._begun[rank]) < count and (arriving := next(self._arriving[rank], None)) is not None:
            done, needed = arriving
            tensors = [self._wires.begin_to_receive(one.shape, one.dtype, rank) for one in self._values(needed)]
            self._begun[rank].append((done, needed, tensors))

    def _give(self, needed: Action, tensors: Sequence[Tensor]) -> None:
        rank = self._layout.rank_of(needed.stage)
        if rank == self._wires.rank:
            self._mail[needed] = [tensor.detach() for tensor in tensors]
        else:
            self._sent[needed] = [self._wires.send(tensor, rank) for tensor in tensors]

    def _values(self, needed: Action) -> list[Value]:
        """The tensors that enter a stage in a forward, or whose gradients enter it in a backward."""
        entering = self._microbatches[needed.microbatch].flow.entering
        return entering[needed.stage] if needed.kind is Kind.FORWARD else _graded(entering[needed.stage + 1])

    # ---------------------------------------------------------------------------------------------------- actions

    def _forward(self, action: Action) -> None:
        stage, one = action.stage, self._microbatches[action.microbatch]
        part = _Part({})
        if stage > 0:
            arrived = self._take(action, stage - 1)
            for value, tensor in zip(one.flow.entering[stage], arrived, strict=True):
                part.received[value.number] = tensor.requires_grad_(value.requires_grad)
        given = map_tensors(part.received, no_view_with_gradient)
        outputs, part.passed = self._pipeline.run_stage(one.flow, stage, given, *one.inputs)
        if stage < self._last:
            leaving = [part.passed[value.number] for value in one.flow.entering[stage + 1]]
            self._give(Action(Kind.FORWARD, stage + 1, one.number), leaving)
        else:
            one.outputs = tensors_in(outputs)
        if torch.is_grad_enabled():
            self._kept[stage, one.number] = part

    def _backward(self, action: Action, ends: Callable[[Microbatch], Pairs]) -> None:
        stage, one = action.stage, self._microbatches[action.microbatch]
        part = self._kept[stage, one.number]
        if action.kind is not Kind.WEIGHTS:
            inputs = [part.received[value.number] for value in _graded(one.flow.entering[stage])]
            pairs = ends(one) if stage == self._last else self._returned(one, stage, part)
            part.pairs = [(tensor, grad) for tensor, grad in pairs if tensor.requires_grad]
            if action.kind is Kind.INPUTS and inputs and part.pairs:
                part.groups = self._of_inputs(part, inputs)
            elif action.kind is Kind.BACKWARD:
                _whole(part)
            if stage > 0:
                slopes = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in inputs]
                self._give(Action(Kind.BACKWARD, stage - 1, one.number), slopes)
            part.received, part.passed = {}, {}  # the second half of a split backward does not need them
        elif part.groups is not None:
            self._of_weights(part)
        else:
            _whole(part)
        if action.kind is not Kind.INPUTS:
            del self._kept[stage, one.number]

    def _returned(self, one: Microbatch, stage: int, part: _Part) -> Pairs:
        """The tensors that a stage passed on, with the gradients received for them."""
        values = _graded(one.flow.entering[stage + 1])
        arrived = self._take(Action(Kind.BACKWARD, stage, one.number), stage + 1)
        return [(part.passed[value.number], grad) for value, grad in zip(values, arrived, strict=True)]

    def _of_inputs(self, part: _Part, inputs: list[Tensor]) -> Any:
        """The first half of a split backward: gradients of the inputs."""

        aliases = [(no_view(tensor), grad) for tensor, grad in part.pairs]  # torch detaches outputs in place
        part.pairs = []
        outputs, grads = map(list, zip(*aliases, strict=True))
        _, groups = stage_backward_input(outputs, grads, inputs, iter(self._pipeline.own_parameters()))
        return groups

    def _of_weights(self, part: _Part) -> None:

        stage_backward_weight(iter(self._pipeline.own_parameters()), part.groups)


def _whole(part: _Part) -> None:
    """Run a backward that is not split."""
    if part.pairs:
        tensors, grads = zip(*part.pairs, strict=True)
        torch.autograd.backward(tensors, grads)


def _graded(values: Sequence[Value]) -> list[Value]:
    return [value for value in values if value.requires_grad]
