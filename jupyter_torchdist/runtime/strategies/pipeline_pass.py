"""One passage of a batch through the stages: all microbatches forward, and later all of them backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...protocol.errors import StrategyError
from .divided import Added, Joined, Way
from .divisors import divisor_of
from .pipeline_flow import Flow, Value
from .shares import map_tensors, tensors_in
from .streams import own_stream

if TYPE_CHECKING:
    from .pipeline import Pipeline


class Wires:
    """Tensors between neighbours, in order; shapes are known on both sides."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.stage, self.stages = group.rank(), group.size()
        self._sent: list[tuple[Any, Tensor]] = []

    def send(self, tensor: Tensor, stage: int) -> None:
        """Begin to send; ``flush`` waits."""
        whole = tensor.detach().contiguous()
        self._sent.append((dist.isend(_bytes(whole), group=self.group, group_dst=stage), whole))

    def receive(self, shape: torch.Size, dtype: torch.dtype, stage: int) -> Tensor:
        """Wait for a tensor."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(_bytes(tensor), group=self.group, group_src=stage)
        return tensor

    def flush(self) -> None:
        """Wait until all is sent."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def from_last(self, tensor: Tensor) -> None:
        """The last stage's values, on all."""
        dist.broadcast(_bytes(tensor), group=self.group, group_src=self.stages - 1)

    def of_holder(self, mine: Tensor, owner: int) -> Tensor:
        """A copy of the owner's tensor on all."""
        if self.stage == owner:
            whole = mine.detach().clone()
        else:
            whole = torch.empty(mine.shape, dtype=mine.dtype, device=self.device)
        dist.broadcast(_bytes(whole), group=self.group, group_src=owner)
        return whole

    def to_first(self, mine: Any, owner: int) -> Any:
        """An owner's object or tensors (on the CPU) at the first stage; None elsewhere."""
        if owner == 0:
            return mine if self.stage == 0 else None
        if self.stage == owner:
            dist.send_object_list([_on_cpu(mine)], group=self.group, group_dst=0)
        if self.stage == 0:
            found = [None]
            dist.recv_object_list(found, group=self.group, group_src=owner)
            return found[0]
        return None

    def summed(self, mine: Tensor, holders: Sequence[int]) -> Tensor:
        """The sum of what the holders have, on each of them: gathered at the first one."""
        first = holders[0]
        if self.stage != first:
            self.send(mine, first)
            self.flush()
            return self.receive(mine.shape, mine.dtype, first)
        total = mine.clone()
        for other in holders[1:]:
            total += self.receive(mine.shape, mine.dtype, other)
        for other in holders[1:]:
            self.send(total, other)
        self.flush()
        return total

    def sum_over_all(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)


def _bytes(tensor: Tensor) -> Tensor:
    """Booleans and complex numbers as numbers that every backend sends."""
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _on_cpu(value: Any) -> Any:
    return map_tensors(value, lambda tensor: tensor.detach().cpu())


@dataclass
class _Microbatch:
    """What a stage keeps of a forward until the backward."""

    rows: slice
    flow: Flow
    received: dict[int, Tensor] = field(default_factory=dict)
    passed: dict[int, Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    weights: list[float | Tensor] = field(default_factory=list)
    """What each output counts with in the whole batch's."""


class Passage:
    """One forward of a pipeline and its backward. All ranks of the pipeline go through it together."""

    def __init__(
        self,
        pipeline: Pipeline,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rows: Sequence[slice],
        ways: tuple[Way, ...] | None,
    ) -> None:
        self._pipeline, self._wires = pipeline, pipeline.wires
        self._stage, self._last = pipeline.stage, pipeline.stages - 1
        self._given = tensors_in((args, kwargs))
        graded = torch.is_grad_enabled()
        self._asking = [tensor for tensor in self._given if graded and tensor.requires_grad]
        leaves = {id(t): t.detach().requires_grad_() for t in self._asking}
        self._leaves = list(leaves.values())
        values = map_tensors((args, kwargs), lambda tensor: leaves.get(id(tensor), tensor))
        self._parts = [pipeline.cut_inputs(values, part) for part in rows]
        self._microbatches = [
            _Microbatch(part, pipeline.flow_of(*inputs)) for part, inputs in zip(rows, self._parts, strict=True)
        ]
        self._ways = ways
        self._total = sum(part.stop - part.start for part in rows)
        self._spent = False

    def outputs(self) -> Any:
        """The whole batch's outputs on all ranks, differentiable."""
        fakes = [tensors_in(one.flow.outputs) for one in self._microbatches]
        if self._ways is not None and len(self._ways) != len(fakes[0]):
            raise StrategyError("the model returns other outputs than it did in the trial")
        differentiable = torch.is_grad_enabled() and any(fake.requires_grad for fake in fakes[0])
        if differentiable:
            anchor = torch.zeros((), requires_grad=True)
            results: Sequence[Tensor] = _Pipelined.apply(self, anchor, *self._asking)  # type: ignore[no-untyped-call]
        else:
            results = self.forward()
        each = iter(results)
        return map_tensors(self._microbatches[0].flow.outputs, lambda _: next(each))

    def requires_grad(self) -> list[bool]:
        """Of each output."""
        return [fake.requires_grad for fake in tensors_in(self._microbatches[0].flow.outputs)]

    def forward(self) -> list[Tensor]:
        """All microbatches through the stages; the outputs, joined."""
        common = torch.get_rng_state()
        with own_stream(1 + self._stage):
            for one, (args, kwargs) in zip(self._microbatches, self._parts, strict=True):
                self._forward_one(one, args, kwargs)
        self._wires.flush()
        self._go_on_alike(common)
        self._parts.clear()
        return [self._joined(place) for place in range(len(tensors_in(self._microbatches[0].flow.outputs)))]

    def _go_on_alike(self, common: Tensor) -> None:
        """The common stream of random numbers is a number further on all ranks if a stage drew any."""
        drew = torch.tensor([float(not torch.equal(torch.get_rng_state(), common))], device=self._wires.device)
        self._wires.sum_over_all(drew)
        torch.set_rng_state(common)
        if drew.item():
            torch.rand(())

    def _forward_one(self, one: _Microbatch, args: Any, kwargs: Any) -> None:
        entering = one.flow.entering
        for value in entering[self._stage]:
            tensor = self._wires.receive(value.shape, value.dtype, self._stage - 1)
            one.received[value.number] = tensor.requires_grad_(value.requires_grad)
        outputs, one.passed = self._pipeline.run_stage(one.flow, one.received, args, kwargs)
        if self._stage < self._last:
            for value in entering[self._stage + 1]:
                self._wires.send(one.passed[value.number], self._stage + 1)
        else:
            one.outputs = tensors_in(outputs)

    def _joined(self, place: int) -> Tensor:
        """One output of the whole batch."""
        way = self._ways[place] if self._ways is not None else None
        fakes = [tensors_in(one.flow.outputs)[place] for one in self._microbatches]
        shape = list(fakes[0].shape)
        if isinstance(way, Joined):
            shape[way.dim] = sum(fake.size(way.dim) for fake in fakes)
        dtype = torch.float32 if self._widened(fakes[0].dtype) else fakes[0].dtype
        whole = torch.empty(shape, dtype=dtype, device=self._wires.device)
        if self._stage == self._last:
            parts = [one.outputs[place] for one in self._microbatches]
            whole.copy_(self._combined(parts, way).detach())
        self._wires.from_last(whole)
        return whole

    def _widened(self, dtype: torch.dtype) -> bool:
        return self._pipeline.in_fp32 and dtype in (torch.float16, torch.bfloat16)

    def _combined(self, parts: Sequence[Tensor], way: Way | None) -> Tensor:
        weights = self._weights(parts, way)
        for one, weight in zip(self._microbatches, weights, strict=True):
            one.weights.append(weight)
        if isinstance(way, Joined):
            return torch.cat([part.detach() for part in parts], way.dim)
        if isinstance(way, Added):
            return torch.stack([part.detach() * weight for part, weight in zip(parts, weights, strict=True)]).sum(0)
        return parts[0]

    def _weights(self, parts: Sequence[Tensor], way: Way | None) -> list[float | Tensor]:
        if not isinstance(way, Added) or not way.mean:
            return [1.0] * len(parts)
        if not way.counted:
            return [(one.rows.stop - one.rows.start) / self._total for one in self._microbatches]
        divisors = [divisor_of(part) for part in parts]
        counted = [divisor for divisor in divisors if divisor is not None]
        if len(counted) != len(parts):
            raise StrategyError("the loss is no longer the cross entropy that it was in the first steps")
        whole = torch.stack(counted).sum()
        return [divisor / whole for divisor in counted]

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """All microbatches back through the stages; the gradients of those inputs that ask for one."""
        if self._spent:
            raise RuntimeError(
                "Trying to backward through the graph a second time: a pipeline keeps what it needs for one backward"
            )
        self._spent = True
        tied = self._pipeline.tied()
        before = [parameter.grad for parameter, _ in tied]
        for parameter, _ in tied:
            parameter.grad = None
        for number, one in enumerate(self._microbatches):
            self._backward_one(number, one, grads)
        self._wires.flush()
        self._microbatches.clear()
        for (parameter, holders), old in zip(tied, before, strict=True):
            mine = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            new = self._wires.summed(mine.to_dense() if mine.is_sparse else mine, holders)
            parameter.grad = new if old is None else old.add_(new)
        return [self._of_all(leaf) for leaf in self._leaves]

    def _of_all(self, leaf: Tensor) -> Tensor:
        """An input may be used in several stages."""
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        self._wires.sum_over_all(grad)
        return grad

    def _backward_one(self, number: int, one: _Microbatch, grads: Sequence[Tensor | None]) -> None:
        if self._stage == self._last:
            pairs = self._last_pairs(number, one, grads)
        else:
            pairs = [
                (one.passed[value.number], self._wires.receive(value.shape, value.dtype, self._stage + 1))
                for value in _graded(one.flow.entering[self._stage + 1])
            ]
        pairs = [(tensor, grad) for tensor, grad in pairs if tensor.requires_grad]
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
        for value in _graded(one.flow.entering[self._stage]):
            received = one.received[value.number]
            grad = torch.zeros_like(received) if received.grad is None else received.grad
            self._wires.send(grad, self._stage - 1)
        one.received, one.passed, one.outputs = {}, {}, []

    def _last_pairs(self, number: int, one: _Microbatch, grads: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
        pairs = []
        for place, output in enumerate(one.outputs):
            grad = grads[place]
            if grad is None or not output.requires_grad:
                continue
            way = self._ways[place] if self._ways is not None else None
            if isinstance(way, Joined):
                sizes = [tensors_in(other.flow.outputs)[place].size(way.dim) for other in self._microbatches]
                grad = grad.narrow(way.dim, sum(sizes[:number]), sizes[number])
            elif isinstance(way, Added):
                grad = grad * one.weights[place]
            elif number:
                continue  # nothing of the batch is in it: the first microbatch's stands for all
            pairs.append((output, grad.to(output.dtype)))
        return pairs


def _graded(values: Sequence[Value]) -> list[Value]:
    return [value for value in values if value.requires_grad]


class _Pipelined(torch.autograd.Function):
    """The join of the microbatches' outputs."""

    @staticmethod
    def forward(ctx: Any, passage: Passage, _anchor: Tensor, *_asking: Tensor) -> tuple[Tensor, ...]:
        ctx.passage = passage
        with torch.enable_grad():
            outputs = passage.forward()
        ctx.mark_non_differentiable(
            *(output for output, graded in zip(outputs, passage.requires_grad(), strict=True) if not graded)
        )
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, None, *ctx.passage.backward(grads))
