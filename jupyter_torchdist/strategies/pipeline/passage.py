"""One passage of a batch through the stages: all microbatches forward, and later all of them backward.

Schedules that mix forwards and backwards (``inside``) use it too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...protocol.errors import StrategyError
from ..analysis.divisors import Parted
from ..core.outputs import closed
from ..core.rng import OwnStream
from ..core.scatter import map_tensors, tensors_in, weighed
from ..step.no_trace import no_trace
from ..step.ways import AddedParts, JoinedRows, Way
from .contract import StagedModel
from .flow import OTHER_LOSS, OTHER_PATH
from .run import Microbatch, Pairs, Work

SPENT = "Trying to backward through the graph a second time: a pipeline keeps what it needs for one backward"


class Passage:
    """One forward of a pipeline and its backward. All ranks of the pipeline run it together."""

    def __init__(
        self,
        pipeline: StagedModel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rows: Sequence[slice],
        ways: tuple[Way, ...] | None,
    ) -> None:
        self._pipeline, self._wires = pipeline, pipeline.wires
        self._last_rank = pipeline.layout.last_rank
        graded = torch.is_grad_enabled()
        self.asking = [tensor for tensor in tensors_in((args, kwargs)) if graded and tensor.requires_grad]
        """Inputs that require a gradient."""
        leaves = {id(t): t.detach().requires_grad_() for t in self.asking}
        self._leaves = list(leaves.values())
        values = map_tensors((args, kwargs), lambda tensor: leaves.get(id(tensor), tensor))
        parts = [pipeline.cut_inputs(values, part) for part in rows]
        sizes = [part.stop - part.start for part in rows]
        flows = {size: pipeline.flow_of(*inputs) for size, inputs in dict(zip(sizes, parts, strict=True)).items()}
        self.microbatches = [
            Microbatch(number, part, flows[size], inputs)
            for number, (part, size, inputs) in enumerate(zip(rows, sizes, parts, strict=True))
        ]
        self.ways = ways
        self.total = sum(sizes)
        self.work = Work(pipeline, self.microbatches)
        self._divisors: dict[int, Tensor] = {}
        """The divisors of outputs that are means over targets."""
        self._spent = False

    def outputs(self) -> Any:
        """The whole batch's outputs on all ranks, differentiable."""
        each = iter(self.differentiable())
        return closed(map_tensors(self.microbatches[0].flow.outputs, lambda _: next(each)))

    def differentiable(self) -> Sequence[Tensor]:
        """The tensors in the outputs."""
        if self.ways is not None and len(self.ways) != len(self.fakes()):
            raise StrategyError(
                "the model returns different outputs than in its trial",
                "return the same outputs in every step, or choose --strategy fsdp",
            )
        if torch.is_grad_enabled() and any(self.requires_grad()):
            anchor = torch.zeros((), requires_grad=True)
            results: Sequence[Tensor] = _Pipelined.apply(self, anchor, *self.asking)  # type: ignore[no-untyped-call]
            return [
                Parted.of(result, self._divisors[place], ()) if place in self._divisors else result
                for place, result in enumerate(results)
            ]
        return self.forward()

    def fakes(self, number: int = 0) -> list[Tensor]:
        """Fake tensors for the outputs of one microbatch."""
        return tensors_in(self.microbatches[number].flow.outputs)

    def requires_grad(self) -> list[bool]:
        """Whether each output requires a gradient."""
        return [fake.requires_grad for fake in self.fakes()]

    def forward(self) -> list[Tensor]:
        """Run all microbatches through the stages; returns the joined outputs."""
        orders, common = self._pipeline.layout.forwards(len(self.microbatches)), torch.get_rng_state()
        if not any(one.flow.may_draw for one in self.microbatches):
            self.work.perform(orders)
            if not torch.equal(torch.get_rng_state(), common):
                raise OTHER_PATH
            return self.joined()
        with OwnStream(1 + self._wires.rank):
            self.work.perform(orders)
        drew = torch.tensor([float(not torch.equal(torch.get_rng_state(), common))], device=self._wires.device)
        somewhere = self._wires.begin_to_sum(drew)
        outputs = self.joined()  # overlaps with the all-reduce
        somewhere.wait()
        torch.set_rng_state(common)
        if drew.item():  # if a stage drew random numbers, the common generator advances by one on all ranks
            torch.rand(())
        return outputs

    def trial(self) -> list[Tensor]:
        """The outputs of the whole batch, computed without a graph and without side effects."""
        with torch.no_grad(), no_trace(self._pipeline.root), OwnStream(1 + self._wires.rank):
            Work(self._pipeline, self.microbatches).perform(self._pipeline.layout.forwards(len(self.microbatches)))
            outputs = self.joined()
        for one in self.microbatches:
            one.outputs, one.weights = [], []
        return outputs

    def joined(self) -> list[Tensor]:
        """The outputs of the whole batch, without a graph, sent by the rank that has them."""
        return [self._joined(place) for place in range(len(self.fakes()))]

    def shape(self, place: int) -> tuple[list[int], torch.dtype]:
        """Shape and dtype of one output of the whole batch."""
        way = self.ways[place] if self.ways is not None else None
        fakes = [self.fakes(one.number)[place] for one in self.microbatches]
        shape = list(fakes[0].shape)
        if isinstance(way, JoinedRows):
            shape[way.dim] = sum(fake.size(way.dim) for fake in fakes)
        return shape, torch.float32 if self._widened(fakes[0].dtype) else fakes[0].dtype

    def _joined(self, place: int) -> Tensor:
        shape, dtype = self.shape(place)
        whole = torch.empty(shape, dtype=dtype, device=self._wires.device)
        if self._wires.rank == self._last_rank:
            parts = [one.outputs[place] for one in self.microbatches]
            whole.copy_(self._combined(place, parts, self.ways[place] if self.ways is not None else None).detach())
        self._wires.hand_out(whole, self._last_rank)
        if self._counts_targets(place):  # other data ranks need the divisor
            divisor = self._divisors.setdefault(place, torch.empty((), dtype=dtype, device=self._wires.device))
            self._wires.hand_out(divisor, self._last_rank)
        return whole

    def _widened(self, dtype: torch.dtype) -> bool:
        return self._pipeline.in_fp32 and dtype in (torch.float16, torch.bfloat16)

    def _combined(self, place: int, parts: Sequence[Tensor], way: Way | None) -> Tensor:
        weights = self._weights(place, way)
        for one, weight in zip(self.microbatches, weights, strict=True):
            one.weights.append(weight)
        if isinstance(way, JoinedRows):
            return torch.cat([part.detach() for part in parts], way.dim)
        if isinstance(way, AddedParts):
            return torch.stack([weighed(part.detach(), one) for part, one in zip(parts, weights, strict=True)]).sum(0)
        return parts[0]

    def _counts_targets(self, place: int) -> bool:
        way = self.ways[place] if self.ways is not None else None
        return isinstance(way, AddedParts) and way.counted and torch.is_grad_enabled()

    def _weights(self, place: int, way: Way | None) -> list[float | Tensor]:
        if not isinstance(way, AddedParts) or not way.mean:
            return [1.0] * len(self.microbatches)
        if not self._counts_targets(place):
            return [(one.rows.stop - one.rows.start) / self.total for one in self.microbatches]
        divisors = [one.divisor(place) for one in self.microbatches]
        counted = [divisor for divisor in divisors if divisor is not None]
        if len(counted) != len(divisors):
            raise OTHER_LOSS
        whole = torch.stack(counted).sum()
        self._divisors[place] = whole.to(self.shape(place)[1])
        return [divisor / whole for divisor in counted]

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run all microbatches backward through the stages; returns the gradients of inputs that require one."""
        if self._spent:
            raise RuntimeError(SPENT)
        self._spent = True
        orders = self._pipeline.layout.backwards(len(self.microbatches))
        self.with_own_gradients([], lambda: self.work.perform(orders, lambda one: self._ends(one, grads)))
        self.microbatches.clear()
        return [self._of_all(leaf) for leaf in self._leaves]

    def with_own_gradients(
        self, apart: Sequence[nn.Parameter], run: Callable[[], Any], scale: Callable[[], Tensor | None] = lambda: None
    ) -> None:
        """``run`` a backward. Parameters that several ranks hold get the sum of their gradients.

        ``scale``: a factor for the new gradients of ``apart`` and tied parameters, not for gradients from before.
        """
        tied = dict(self._pipeline.tied())
        before = {parameter: parameter.grad for parameter in dict.fromkeys((*tied, *apart))}
        for parameter in before:
            parameter.grad = None
        run()
        factor = scale()
        for parameter, old in before.items():
            new = parameter.grad
            if parameter in tied:
                new = torch.zeros_like(parameter) if new is None else new.to_dense() if new.is_sparse else new
                new = self._wires.summed(new, tied[parameter])
            if new is not None and factor is not None:
                new = new * factor.to(new.dtype)
            parameter.grad = new if old is None else old if new is None else old.add_(new)

    def _of_all(self, leaf: Tensor) -> Tensor:
        """The gradient of an input, summed over ranks, because several stages may use the input."""
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        self._wires.sum_over_all(grad)
        return grad

    def _ends(self, one: Microbatch, grads: Sequence[Tensor | None]) -> Pairs:
        pairs = []
        for place, output in enumerate(one.outputs):
            grad = grads[place]
            if grad is None or not output.requires_grad:
                continue
            way = self.ways[place] if self.ways is not None else None
            if isinstance(way, JoinedRows):
                grad = grad.narrow(way.dim, *self.rows_of(one, place, way))
            elif isinstance(way, AddedParts):
                grad = grad * one.weights[place]
            elif one.number:
                continue  # it does not depend on the batch: only the first microbatch counts
            pairs.append((output, grad.to(output.dtype)))
        one.outputs = []
        return pairs

    def rows_of(self, one: Microbatch, place: int, way: JoinedRows) -> tuple[int, int]:
        """The start and the number of a microbatch's rows in an output of the whole batch."""
        sizes = [self.fakes(other.number)[place].size(way.dim) for other in self.microbatches]
        return sum(sizes[: one.number]), sizes[one.number]


class _Pipelined(torch.autograd.Function):
    """The autograd function that joins the microbatches' outputs."""

    @staticmethod
    def forward(ctx: Any, passage: Passage, _anchor: Tensor, *_asking: Tensor) -> tuple[Tensor, ...]:
        ctx.passage = passage
        graded = passage.requires_grad()
        with torch.enable_grad():
            outputs = passage.forward()
        ctx.mark_non_differentiable(*(output for output, asks in zip(outputs, graded, strict=True) if not asks))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, None, *ctx.passage.backward(grads))
