"""Schedules that begin backwards before all forwards have ended, for a loop that computes its loss itself.

An unmodified loop computes its loss after the forward. So the forward returns ``Deferred`` outputs, and the operations
on them are recorded until ``backward()``. If the loss is proved to be a sum or mean of the microbatches' losses
(``loss``), the last stage computes it for each microbatch, and the schedule runs in ``backward()``, with forwards and
backwards mixed. No stage keeps activations of the whole batch.

If a step cannot run so, the user is told, or an error is raised if it is the first step: nothing was trained before.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...protocol.errors import StrategyError
from ..analysis.numerals import user_place
from ..core.context import ParallelContext
from ..core.outputs import closed
from ..core.rng import OwnStream, as_then, present, undone
from ..core.scatter import map_tensors
from ..step.deferred import Deferred, OperationRecord
from ..step.views import versions
from .contract import StagedModel
from .loss import Graph, Parts, graph_of, proved, weight_of
from .passage import SPENT, Passage
from .run import Microbatch, Pairs
from .schedules import Orders

_BY_SCHEDULE, _TO_BE_PROVED, _AT_ONCE = range(3)
"""How a rank wants to run a step when its values are needed. The largest number applies to all ranks."""


class Inside:
    """The mixed schedule of one pipeline."""

    def __init__(self, pipeline: StagedModel, context: ParallelContext) -> None:
        self.pipeline, self._say = pipeline, context.say
        self._name = pipeline.layout.schedule
        self._known: dict[Hashable, Parts] = {}
        self._has_run = self._has_said = False

    def outputs(self, passage: Passage) -> Any:
        """The outputs of the forward, deferred if the schedule can be used."""
        try:
            orders = self.pipeline.layout.inside(len(passage.microbatches))
        except StrategyError as error:
            return self._whole(passage, error.message, error.hint)
        if len(passage.microbatches) == 1:
            return self._whole(passage, "the batch goes through in one piece")
        if passage.asking:
            return self._whole(passage, "an input of the model asks for a gradient")
        if not any(passage.requires_grad()):
            return passage.outputs()
        step = LossStep(self, passage, orders)
        each = iter(step.record.outputs)
        return closed(map_tensors(passage.microbatches[0].flow.outputs, lambda _: next(each)))

    def _whole(self, passage: Passage, reason: str, hint: str = "") -> Any:
        self.instead(reason, hint)
        return passage.outputs()

    def instead(self, reason: str, hint: str = "") -> None:
        """Run all forwards of this step first, and say so once. Raises ``StrategyError`` in the first step."""
        if not self._has_run:
            raise StrategyError(
                f"-O schedule={self._name} starts backwards before all forwards have ended; here it cannot: {reason}",
                hint or "use -O schedule=gpipe (or looped_bfs), which takes any loss",
            )
        if not self._has_said:
            self._has_said = True
            self._say(f"in a step all forwards ran before the backwards, unlike in schedule {self._name}: {reason}")

    def ran(self) -> None:
        """A step has run by the schedule."""
        self._has_run = True

    def parts(self, signature: Hashable) -> Parts | None:
        """How a loss is made of parts, if it was proved before."""
        return self._known.get(signature)

    def learn(self, signature: Hashable, parts: Parts) -> None:
        self._known[signature] = parts

    def draws(self, passage: Passage) -> bool:
        """Whether a forward of this kind draws random numbers. The first call finds it by a forward without a graph."""
        flow = passage.microbatches[0].flow
        if flow.draws is None and flow.may_draw:
            before = torch.get_rng_state()
            with undone():
                passage.trial()
                drew = not torch.equal(torch.get_rng_state(), before)
            flow.draws = bool(self.pipeline.wires.largest([int(drew)])[0])
        return bool(flow.draws)


class LossStep:
    """One passage whose forwards and backwards are mixed, or run one after the other."""

    def __init__(self, inside: Inside, passage: Passage, orders: Orders) -> None:
        self._inside, self._passage, self._orders = inside, passage, orders
        self._pipeline = inside.pipeline
        draws = inside.draws(passage)
        self._drawn_from = present()
        if draws:
            torch.rand(())
        self._called = self._state()
        kind = self._pipeline.wires.device.type
        self._autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self.record = OperationRecord(self, self._fakes(), self._pipeline.fake_mode, self._pipeline.wires.device)
        self._value, self._weight, self._unit = 0.0, 0.0, 0.0

    def _fakes(self) -> list[Tensor]:
        """Fake tensors for the outputs of the whole batch."""
        made = []
        for place, graded in enumerate(self._passage.requires_grad()):
            shape, dtype = self._passage.shape(place)
            with self._pipeline.fake_mode:
                fake = torch.empty(shape, dtype=dtype, device=self._pipeline.wires.device)
            made.append(fake.requires_grad_(graded).view_as(fake) if graded else fake)
        return made

    def _state(self) -> list[Any]:
        """State that must not change between the call of the forward and its computation."""
        own = versions(list(self._pipeline.root.parameters()))
        given = versions([tensor for one in self._passage.microbatches for tensor in one.tensors()])
        return [own, given, [module.training for module in self._pipeline.root.modules()]]

    @contextmanager
    def _as_called(self) -> Iterator[None]:
        """Run the forward in the state of its call. Raises ``StrategyError`` if the state has changed."""
        if self._state() != self._called:
            raise StrategyError(
                "weights, inputs or train()/eval() of the model changed between its forward and backward()",
                "use -O schedule=gpipe, which computes a forward when it is called",
            )
        kind, dtype, enabled = self._autocast
        with (
            self._pipeline.within(),
            as_then(self._drawn_from),
            torch.enable_grad(),
            torch.autocast(kind, dtype, enabled),
            self._pipeline.precision(),
        ):
            yield

    # --------------------------------------------------------------------------------------------- values are needed

    def now(self, why: str) -> Sequence[Tensor]:
        """As ``Source``: this rank needs a value now."""
        self._pipeline.wires.largest([_AT_ONCE, 0])
        return self._forward(f"{_place()} needs a value before backward() ({why})")

    def _forward(self, reason: str) -> Sequence[Tensor]:
        self._inside.instead(reason)
        with self._as_called():
            return self._passage.differentiable()

    def backward(self, loss: Deferred, grad: Tensor | None) -> bool:
        """As ``Source``: run the whole step, by the schedule if the loss is proved."""
        graph = graph_of(self.record, loss, len(self._passage.fakes()))
        signature = graph.signature(self._passage.total)
        parts = self._inside.parts(signature)
        mind = _BY_SCHEDULE if parts is not None else _TO_BE_PROVED
        agreed, wanted = self._pipeline.wires.largest([mind, int(self.record.wanted(loss))])
        if agreed == _AT_ONCE:
            self.record.come(self._forward("a rank needs a value before backward()"))
            return False
        if agreed == _TO_BE_PROVED:
            found = self._proof(graph)
            if isinstance(found, str):
                self.record.come(self._forward(f"the loss cannot be computed from those of the microbatches: {found}"))
                return False
            self._inside.learn(signature, found)
            parts = found
        assert parts is not None
        self._run(graph, parts, grad, loss.dtype, wanted=bool(wanted))
        return True

    def _proof(self, graph: Graph) -> Parts | str:
        with self._as_called(), undone():
            outputs = self._passage.trial()
        assert self._passage.ways is not None
        return proved(graph, outputs, self._passage.ways, [one.rows for one in self._passage.microbatches])

    # --------------------------------------------------------------------------------------------------- by schedule

    def _run(self, graph: Graph, parts: Parts, grad: Tensor | None, dtype: torch.dtype, *, wanted: bool) -> None:
        """Run forwards and backwards in the schedule's order; then set the values that user code may read."""
        passage, wires, counted = self._passage, self._pipeline.wires, parts.way.counted
        sums = torch.zeros(3, dtype=torch.float64, device=wires.device)

        def ends(one: Microbatch) -> Pairs:
            return self._ends(one, graph, parts, grad, wanted=wanted)

        def scale() -> Tensor | None:
            """The factor for means over targets: the total number of targets is known only at the end."""
            sums.copy_(torch.tensor([self._value, self._weight, self._unit]))
            wires.from_rank(sums, self._pipeline.layout.last_rank)
            return sums[2] * len(passage.microbatches) / sums[1] if counted else None

        with self._as_called():
            with OwnStream(1 + wires.rank):
                apart = self._pipeline.own_parameters() if counted else []
                passage.with_own_gradients(apart, lambda: passage.work.perform(self._orders, ends), scale)
            outputs = passage.joined() if wanted else []
        known = {graph.loss: _spent((sums[0] / sums[1] if parts.way.mean else sums[0]).to(dtype))}
        if wanted:
            self.record.come([_spent(one) if one.is_floating_point() else one for one in outputs], known)
        else:
            self.record.come_alone(known)
        passage.microbatches.clear()
        self._inside.ran()

    def _ends(self, one: Microbatch, graph: Graph, parts: Parts, grad: Tensor | None, *, wanted: bool) -> Pairs:
        """The loss of one microbatch, with its gradient (its weight)."""
        total = self._passage.total
        outputs = [self._pipeline.as_given(output) for output in one.outputs]
        with torch.enable_grad():
            loss = graph.value(outputs, parts.externals(graph, one.rows, total))
        weight = float(weight_of(loss, parts.way, one.rows, total))
        if wanted:
            one.let_go()
        else:
            one.outputs = []
        if weight == 0:  # all its targets are to be ignored: its own mean is 0 / 0
            return []
        self._value += float(loss.detach()) * weight
        self._weight += weight
        begin = torch.ones_like(loss) if grad is None else grad.to(loss.dtype)
        return [(loss, begin * self._relative(weight, counted=parts.way.counted))]

    def _relative(self, weight: float, *, counted: bool) -> float:
        """The number of targets relative to the first microbatch: near 1, so that half precision does not overflow."""
        if not counted:
            return weight
        self._unit = self._unit or weight
        return weight / ((self._unit or 1.0) * len(self._passage.microbatches))


def _place() -> str:
    place = user_place()
    return "the cell" if place is None else f"{place}"


def _spent(value: Tensor) -> Tensor:
    """A value whose graph ``backward`` has used already."""
    spent: Tensor = _Spent.apply(value.detach(), torch.zeros((), requires_grad=True))  # type: ignore[no-untyped-call]
    return spent


class _Spent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, _anchor: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(SPENT)
