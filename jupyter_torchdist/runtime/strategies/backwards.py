"""Losses and gradients of user code, such that they are one device's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ...protocol.errors import StrategyError
from ..autolog import UNSCALED
from .accumulating import Accumulation
from .averaging import Averaging
from .deepspeed import Engine
from .divided import Divider, targets_of
from .higher import Gathered
from .loops import Loops
from .optimized import Optimized
from .shares import averaged

Weight = float | torch.Tensor
"""What a rank's loss counts with in the whole batch's."""


class Backwards:
    """What ``backward()`` and ``torch.autograd.grad`` do beside what they did. ``is_within``: in a model's forward."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        optimized: Optimized,
        divider: Divider,
        loops: Loops,
        is_within: Callable[[], bool],
        averaging: Averaging,
        gathered: Gathered,
        accumulation: Accumulation | None = None,
        engine: Engine | None = None,
    ) -> None:
        self._group, self._optimized, self._averaging = group, optimized, averaging
        self._divider, self._loops, self._is_within, self._gathered = divider, loops, is_within, gathered
        self._accumulation, self._engine = accumulation, engine

    def backward(
        self, original: Callable[..., Any], tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """In place of ``torch.autograd.backward``: the losses become the whole batch's, the gradients one device's."""
        if self._is_within() or torch._C._current_graph_task_id() != -1:
            original(tensors, grad_tensors, *args, **kwargs)  # a backward within a forward or a backward
            return
        losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        create_graph = _creates_graph(*args, **kwargs)
        self._gathered.before(create_graph=create_graph)
        if self._loops.watch is not None:
            self._loops.watch.backward(losses, [value for loss in losses for value in _values(loss)])
        with self._loops.aside():
            if self._engine is not None:
                self._run(
                    functools.partial(self._engine.backward, original), tensors, losses, grad_tensors, args, kwargs
                )
                return
            if self._accumulation is not None:
                original = functools.partial(self._in_parts, original)
            self._averaging.begin(silent=self._is_silent(), create_graph=create_graph)
            try:
                self._run(original, tensors, losses, grad_tensors, args, kwargs)
            except BaseException:
                self._averaging.fail()
                raise
            if self._divider.divided:
                # Idempotent: what is averaged already stays as it is, so accumulated gradients are right too.
                self._averaging.average(self._optimized.parameters())
        self._gathered.after_backward(create_graph=create_graph)

    def _run(
        self,
        original: Callable[..., Any],
        tensors: Any,
        losses: Sequence[torch.Tensor],
        grad_tensors: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if self._loops.sliced is None:
            original(tensors, grad_tensors, *args, **kwargs)
        else:
            joined = [self._joined(loss) for loss in losses]
            original(tensors, self._scaled(losses, [weight for weight, _ in joined], grad_tensors), *args, **kwargs)
            for _, write in joined:
                write()

    def _is_silent(self) -> bool:
        """Whether nothing in the model's backward communicates: the loop has its rows alone, normalised alone.

        Not in parts either, each of which gives every gradient.
        """
        return self._loops.sliced is not None and not self._divider.synchronised and self._accumulation is None

    def _in_parts(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Arguments are those of ``torch.autograd.backward``: the fourth is ``create_graph``."""
        assert self._accumulation is not None
        again = kwargs.get("create_graph") or (len(args) > 3 and args[3])
        with self._accumulation.backward(plain=not again and kwargs.get("inputs") is None):
            original(*args, **kwargs)

    def _joined(self, loss: torch.Tensor) -> tuple[Weight, Callable[[], None]]:
        """What a rank's loss counts with, and what writes the whole batch's into the user's tensors afterwards.

        All is sent before the backward, on every rank: no ``item()`` waits. One all-reduce, of which a backward waits
        only when the targets have to be counted.
        """
        way, share = self._loops.joint_of(loss)
        values, work = _values(loss), None
        if way.counted:
            mine = targets_of(loss).expand_as(loss)
            sent = torch.stack([mine, *(value.detach() * mine for value in values)])
            dist.all_reduce(sent, group=self._group)
            weight: Weight = mine / sent[0]
            whole = sent[1:] / sent[0]
        else:
            weight = share.weight if way.mean else 1.0
            whole = torch.stack([value.detach() for value in values]) * weight
            work = dist.all_reduce(whole, group=self._group, async_op=True)

        def write() -> None:
            if work is not None:
                work.wait()
            for value, one in zip(values, whole.unbind(), strict=True):
                value.data.copy_(one)

        return weight, write

    def _scaled(self, losses: Sequence[torch.Tensor], weights: Sequence[Weight], grads: Any) -> Any:
        """The gradients of the losses, such that their mean over the ranks is one device's."""
        ranks = self._group.size()
        if all(isinstance(weight, float) and weight * ranks == 1.0 for weight in weights):
            return grads
        given = [None] * len(losses) if grads is None else [grads] if isinstance(grads, torch.Tensor) else list(grads)
        return [
            (torch.ones_like(loss) if grad is None else grad) * (weight * ranks)
            for loss, weight, grad in zip(losses, weights, given, strict=True)
        ]

    def grad(self, original: Callable[..., Any], outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """What the cell asks for itself; within a forward it is of this rank's rows alone, and stays so.

        Raises ``StrategyError`` for sharded parameters, whose gradients exist within ``backward()`` only.
        """
        if any(isinstance(one, DTensor) for one in ([inputs] if isinstance(inputs, torch.Tensor) else inputs)):
            raise StrategyError(
                "torch.autograd.grad of parameters that fsdp has sharded", "use --strategy ddp, or backward()"
            )
        within = self._is_within() or torch._C._current_graph_task_id() != -1
        if not within:
            self._gathered.before(create_graph=bool(args[2] if len(args) > 2 else kwargs.get("create_graph")))
            if self._accumulation is not None:
                self._accumulation.check_asked(inputs, self._optimized.parameters())
        grads = original(outputs, inputs, *args, **kwargs)
        if within or not self._divider.divided:
            return grads
        return tuple(None if grad is None else averaged(grad, self._group) for grad in grads)


def _creates_graph(_retain: Any = None, create_graph: bool = False, *_: Any, **kwargs: Any) -> bool:
    """Of the arguments of ``backward``."""
    return bool(kwargs.get("create_graph", create_graph))


def _values(loss: torch.Tensor) -> list[torch.Tensor]:
    """Tensors that show a loss: it, and what a GradScaler scaled."""
    source = getattr(loss, UNSCALED, None)
    return [loss] if source is None else [loss, source]
