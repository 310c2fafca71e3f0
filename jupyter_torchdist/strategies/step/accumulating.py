"""``--grad-accumulation N``: a forward computes its rows in N parts, one after another, without their activations.

In the backward each part is recomputed, and its gradients are added to the parameters' gradients. So activations need
the memory of one part only; the price is a second forward. The cell sees the outputs of the global batch: the loss
and the gradients are as without parts, for one optimizer step per batch. (Gao et al., Scaling Deep Contrastive
Learning Batch Size under Memory Limited Setup, 2021, https://arxiv.org/abs/2101.06983.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ...checkpoint import randomness
from ...protocol.errors import StrategyError
from ...protocol.strategy import StrategyPlan
from ...torch_private.places import BatchNorm
from ..analysis.divisors import Parted, divisor_of, form_of
from ..core.context import ParallelContext
from ..core.scatter import BatchShard, map_tensors, tensors_in, weighed
from .ways import AddedParts, JoinedRows, Way

Run = Callable[..., Any]

HINT = "leave --grad-accumulation out; --activation-checkpointing saves memory within each block of the model"


def check(model: nn.Module, context: ParallelContext) -> None:
    """Raise ``StrategyError`` for a model whose results on parts of a batch would differ from the global batch."""
    if _parts(context.plan) == 1:
        return
    if context.plan.degree("pp") > 1:
        raise StrategyError(
            "--grad-accumulation and a pipeline: it takes a batch in microbatches already, and adds their gradients",
            f"use -O microbatches={context.plan.grad_accumulation * context.plan.degree('pp')} instead",
        )
    if context.plan.options.get("model") == "whole":
        raise StrategyError(
            "--grad-accumulation computes a batch in parts, but -O model=whole does not check that this is correct",
            "leave one of them out",
        )
    for name, module in model.named_modules():
        if module.training and isinstance(module, BatchNorm):
            raise StrategyError(
                f"--grad-accumulation: {name} ({type(module).__name__}) normalises over the batch, and a part of "
                "the batch has other statistics",
                "use layers that normalise each sample (GroupNorm, LayerNorm), or leave --grad-accumulation out",
            )


def of(plan: StrategyPlan) -> Accumulation | None:
    """The accumulation that the plan asks for, or None."""
    return Accumulation(_parts(plan)) if _parts(plan) > 1 else None


def said(plan: StrategyPlan) -> str:
    """Text for the line that tells the user what was done."""
    if _parts(plan) == 1:
        return ""
    return f"; it is computed in {plan.grad_accumulation} parts, whose gradients are added for one optimizer step"


def _parts(plan: StrategyPlan) -> int:
    """The number of parts. 1 for DeepSpeed: it accumulates over batches (``gradient_accumulation_steps``)."""
    return 1 if plan.name == "deepspeed" else plan.grad_accumulation


class Accumulation:
    """Runs forwards in ``count`` parts; fewer if a rank has fewer rows."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._backward = False
        self._tried: set[int] = set()

    @property
    def as_ranks(self) -> Any:
        """A stand-in for a process group: the parts of a batch as ranks; this process is the first."""
        return _Ranks(self.count)

    @contextlib.contextmanager
    def backward(self, *, plain: bool) -> Iterator[None]:
        """Within ``backward()`` of user code. Not ``plain``: with ``inputs`` or ``create_graph``."""
        before, self._backward = self._backward, plain
        try:
            yield
        finally:
            self._backward = before

    def __call__(
        self,
        forward: Run,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ways: Sequence[Way],
        cut: Sequence[bool],
        share: BatchShard,
    ) -> Any:
        """Run ``forward(*args, **kwargs)`` in parts; ``cut`` tells which tensors hold the rank's rows of ``share``.

        All ranks use the same number of parts: a sharded model communicates in each. ``ways``: how the outputs of
        the parts are combined. Raises ``StrategyError`` for a module that a call changes.
        """
        parts = _even(share.mine.stop - share.mine.start, min(self.count, share.total // share.ranks))
        if len(parts) < 2:
            return forward(*args, **kwargs)
        given = tensors_in((args, kwargs))
        made: list[_Part] = []
        outputs: list[tuple[torch.Tensor, ...]] = []
        for number, rows in enumerate(parts):
            part = _Part(self, forward, args, kwargs)
            tensors = [tensor[rows] if is_cut else tensor for tensor, is_cut in zip(given, cut, strict=True)]
            with self._unchanged(module) if number == 1 else contextlib.nullcontext():
                outputs.append(_Run.apply(part, _anchor(), *tensors))  # type: ignore[no-untyped-call]
            made.append(part)
        if any(len(one) != len(ways) for one in outputs):
            raise StrategyError("the model returns different outputs for a part of the batch than in its trial", HINT)
        weights = [(rows.stop - rows.start) / parts[-1].stop for rows in parts]
        joined = iter(
            _joined(way, [one[number] for one in outputs], [part.facts[number] for part in made], weights)
            for number, way in enumerate(ways)
        )
        return map_tensors(made[0].structure, lambda _: next(joined))

    @contextlib.contextmanager
    def _unchanged(self, module: nn.Module) -> Iterator[None]:
        """Raise if a call changes the module: a counter of calls would count each part twice. Checks once a module."""
        if id(module) in self._tried:
            yield
            return
        before = dict(_state(module))
        yield
        for name, value in _state(module):
            if name in before and before[name] != value:
                raise StrategyError(f"--grad-accumulation: the forward of {type(module).__name__} changes {name}", HINT)
        self._tried.add(id(module))

    def check_asked(self, inputs: Sequence[Any], trained: Sequence[torch.Tensor]) -> None:
        """Raise ``StrategyError`` if ``torch.autograd.grad`` asks for gradients of trained parameters."""
        if {id(one) for one in inputs} & {id(one) for one in trained}:
            self.refuse_other_gradients()

    def refuse_other_gradients(self) -> None:
        """Raise ``StrategyError`` outside ``backward()``: parts add to the gradients of parameters directly."""
        if not self._backward:
            raise StrategyError(
                "--grad-accumulation computes gradients in backward() alone: the cell asks for some of them, or for "
                "gradients of gradients",
                HINT,
            )


@dataclass(frozen=True)
class _Ranks:
    count: int

    def size(self) -> int:
        return self.count

    def rank(self) -> int:
        return 0


def _even(rows: int, count: int) -> list[slice]:
    bounds = [rows * number // max(1, count) for number in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


class _Part:
    """The forward of one part, run twice with the same random state and autocast."""

    def __init__(self, accumulation: Accumulation, forward: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.accumulation, self._forward = accumulation, forward
        self._inputs = map_tensors((args, kwargs), lambda tensor: torch.empty(0))
        self._random = randomness.capture()
        self._casts = [_cast(kind) for kind in ("cpu", "cuda")]
        self.structure: Any = None
        self.facts: list[tuple[torch.Tensor | None, tuple[str, ...]]] = []
        """Divisor and form (see ``divisors``) of each output."""

    def first(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[bool]]:
        """The outputs, and which of them require a gradient. Activations are freed."""
        _, outputs = self._run(tensors)
        found = tensors_in(outputs)
        self.facts = [(divisor_of(output), form_of(output)) for output in found]
        self.structure = map_tensors(outputs, lambda tensor: torch.empty(0))
        return [output.detach() for output in found], [output.requires_grad for output in found]

    def again(self, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Recompute, add to the gradients of the parameters, and return the gradients of the inputs."""
        self.accumulation.refuse_other_gradients()
        now = randomness.capture()
        randomness.restore(self._random)
        try:
            with contextlib.ExitStack() as casts:
                for cast in self._casts:
                    casts.enter_context(cast())
                inputs, outputs = self._run(tensors)
            pairs = [
                (output, grad)
                for output, grad in zip(tensors_in(outputs), grads, strict=True)
                if grad is not None and output.requires_grad
            ]
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        finally:
            randomness.restore(now)
        return [one.grad if one.requires_grad else None for one in inputs]

    def _run(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        following = iter(inputs)
        args, kwargs = map_tensors(self._inputs, lambda _: next(following))
        with torch.enable_grad():
            return inputs, self._forward(*args, **kwargs)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: _Part, _anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.part = part
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        outputs, differentiable = part.first(tensors)
        ctx.mark_non_differentiable(*[one for one, differs in zip(outputs, differentiable, strict=True) if not differs])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *ctx.part.again(ctx.saved_tensors, grads)


def _anchor() -> torch.Tensor:
    """An input that requires a gradient: parameters are not inputs of the function."""
    return torch.empty(0, requires_grad=True)


def _cast(kind: str) -> Callable[[], AbstractContextManager[Any]]:
    """A factory for the current autocast context."""
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    if kind != "cpu" and not enabled:
        return contextlib.nullcontext
    cached = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(kind, dtype, enabled, cached)


def _joined(
    way: Way,
    values: Sequence[torch.Tensor],
    facts: Sequence[tuple[torch.Tensor | None, tuple[str, ...]]],
    weights: Sequence[float],
) -> torch.Tensor:
    """The output of the global batch from the outputs of the parts, as ``divided`` combines those of ranks."""
    if isinstance(way, JoinedRows):
        return torch.cat(list(values), way.dim)
    if not isinstance(way, AddedParts):
        return values[0]
    if not way.mean:
        return torch.stack(list(values)).sum(0)
    divisors = [divisor for divisor, _ in facts]
    known = [divisor for divisor in divisors if divisor is not None]
    if way.counted and len(known) == len(values):
        total = torch.stack(known).sum()
        counted = [weighed(value, divisor / total) for value, divisor in zip(values, known, strict=True)]
        return Parted.of(torch.stack(counted).sum(0), total, facts[0][1])
    parts = [value * weight for value, weight in zip(values, weights, strict=True)]
    return Parted.of(torch.stack(parts).sum(0), None, facts[0][1])


def _state(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The versions of buffers and the plain attributes of all submodules."""
    for place, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            yield f"{place}.{name}".lstrip("."), buffer._version
        for name, value in vars(part).items():
            if isinstance(value, (int, float, str)):
                yield f"{place}.{name}".lstrip("."), value
