"""Makes the losses and gradients of user code equal to the single-device result."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.distributed.tensor import DTensor

from ..protocol.errors import StrategyError
from ..torch_private.autograd import in_backward, in_functorch
from ..torch_private.tracing import is_tracing
from ..usercode.frames import users_frame
from .core.hooks import Before
from .core.scatter import averaged
from .distributing import Distributor
from .loop.leaves import functions_of_the_cell, own_parameters, untrained
from .loop.loops import Loops
from .loop.loss_scaling import BatchLoss, Joining, Weight


class Backwards:
    """What ``backward()`` and ``torch.autograd.grad`` do in addition. ``is_within``: in a model's forward."""

    def __init__(self, work: Distributor, loops: Loops, is_within: Callable[[], bool]) -> None:
        self._work, self._loops, self._is_within = work, loops, is_within
        self._joining = Joining(work.group)
        self.seen = False
        """Whether the cell has called ``backward()``."""

    def backward(
        self, original: Callable[..., Any], tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """In place of ``torch.autograd.backward``: losses and gradients become the ones of the global batch."""
        if self._is_within() or in_backward():
            original(tensors, grad_tensors, *args, **kwargs)  # a backward within a forward or a backward
            return
        first, self.seen = not self.seen, True
        losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        create_graph = creates_graph(*args, **kwargs)
        if create_graph and self._work.models and self._work.context.plan.degree("dp_shard") > 1:
            raise StrategyError(
                "backward(create_graph=True) of a model that fsdp has sharded: the gradients in .grad have no graph",
                "take them by torch.autograd.grad(loss, list(model.parameters()), create_graph=True), or use "
                "--strategy ddp",
            )
        self._work.gathered.before(create_graph=create_graph)
        self._loops.backward(losses)
        self._look_for_leaves(losses)
        if first and self._work.divider.dividing:
            self._tell_of_functions(losses)
        with self._loops.aside(), contextlib.ExitStack() as at_work:
            for staged in self._work.pipelines:
                at_work.enter_context(staged.at_work())
            if self._work.engine is not None:
                original = functools.partial(self._work.engine.backward, original)
            elif self._work.accumulation is not None:
                original = functools.partial(self._in_parts, original)

            def run(grads: Any) -> None:
                original(tensors, grads, *args, **kwargs)

            if self._work.engine is not None:
                for one in self._run(run, losses, grad_tensors):
                    self._joining.finish(one)
                return
            self._averaged(run, losses, grad_tensors, create_graph=create_graph)
        self._work.gathered.after_backward(create_graph=create_graph)

    def _look_for_leaves(self, losses: Sequence[torch.Tensor]) -> None:
        """A loop needs whole batches where the cell may use gradients that no optimizer uses: they are not averaged."""
        watch = self._loops.watch
        if watch is None or watch.reason is not None:
            return
        roots = [parameter for root in self._work.roots.values() for _, parameter in own_parameters(root)]
        trained = set(map(id, [*self._work.optimized.parameters(), *roots]))
        name = untrained(losses, users_frame(sys._getframe(2)), trained)
        if name is not None:
            watch.object(f"backward() fills {name}.grad, which no optimizer uses")

    def _tell_of_functions(self, losses: Sequence[torch.Tensor]) -> None:
        for name in functions_of_the_cell(losses):
            self._work.context.say(
                f"the backward of {name} is not checked: it must treat each sample apart, and give twice the result "
                "for twice the gradient; -O model=whole computes the whole batch on every rank"
            )

    def _averaged(
        self, run: Callable[[Any], None], losses: Sequence[torch.Tensor], grad_tensors: Any, *, create_graph: bool
    ) -> None:
        """A backward whose gradients the ranks average. It may add to gradients that are averaged already."""
        averaging, parameters, divided = (
            self._work.averaging,
            self._work.optimized.parameters(),
            self._work.divider.divided,
        )
        anew = divided and not create_graph and averaging.begins_anew(parameters)
        before = Before(parameters, anew=anew)
        new = anew or (not create_graph and all(parameter.grad is None for parameter in parameters))
        summed = anew and averaging.begin(
            silent=self._is_silent(), may_sum=self._loops.sliced is not None, kept=before.has_gradients
        )
        try:
            joined = self._run(run, losses, grad_tensors, new=new, summed=summed)
        except BaseException:
            averaging.fail()
            before.undo()
            raise
        if divided:
            # Idempotent: the mean of averaged gradients is the same, so accumulated gradients are right too.
            averaging.average(parameters)
        factor = math.prod([self._joining.finish(one, averaging.carried) for one in joined])
        if factor != 1.0:
            _multiply(parameters, factor)
        before.follow(create_graph=create_graph)

    def _run(
        self,
        run: Callable[[Any], None],
        losses: Sequence[torch.Tensor],
        grad_tensors: Any,
        *,
        new: bool = False,
        summed: bool = False,
    ) -> list[BatchLoss]:
        """Run it; returns losses being joined. ``new``: there is no gradient yet; ``summed``: gradients are summed."""
        if self._loops.sliced is None:
            run(grad_tensors)
            return []
        alone, averaging = len(losses) == 1, self._work.averaging
        joined = [
            self._joining.send(
                loss,
                *self._loops.joint_of(loss),
                may_guess=new and alone,
                carry=averaging.carry if alone and averaging.carries(loss.dtype) else None,
            )
            for loss in losses
        ]
        ranks = 1 if summed else self._work.group.size()
        run(_scaled(losses, [one.weight * ranks for one in joined], grad_tensors))
        return joined

    def _is_silent(self) -> bool:
        """Whether nothing in the model's backward communicates.

        The loop has only its rows, batch normalisation is not synchronised, and no accumulation splits the backward.
        """
        return (
            self._loops.sliced is not None and not self._work.divider.synchronised and self._work.accumulation is None
        )

    def _in_parts(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """The arguments are the ones of ``torch.autograd.backward``: the fourth is ``create_graph``."""
        assert self._work.accumulation is not None
        again = kwargs.get("create_graph") or (len(args) > 3 and args[3])
        with self._work.accumulation.backward(plain=not again and kwargs.get("inputs") is None):
            original(*args, **kwargs)

    def grad(self, original: Callable[..., Any], outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Gradients that the cell asks for. Within a forward they stay the gradients of this rank's rows only.

        Raises ``StrategyError`` for parameters that are sharded or in pipeline stages: they have gradients only in
        ``backward()``.
        """
        if isinstance(inputs, dict):
            grads = self.grad(original, outputs, tuple(inputs.values()), *args, **kwargs)
            return dict(zip(inputs, grads, strict=True))
        inputs = (inputs,) if isinstance(inputs, (torch.Tensor, GradientEdge)) else tuple(inputs)
        if any(isinstance(one, DTensor) for one in inputs):
            raise StrategyError(
                "torch.autograd.grad of parameters that the strategy has sharded", "use --strategy ddp, or backward()"
            )
        if any(staged.has(inputs) for staged in self._work.pipelines):
            raise StrategyError(
                "torch.autograd.grad of parameters of a pipeline, whose stages are on several ranks",
                "use --strategy ddp, or backward()",
            )
        within = self._is_within() or in_backward()
        # A transform of torch.func (vmap, grad) gives the single-device result on every rank. torch.compile asks for
        # the gradients of a graph that it makes.
        within = within or in_functorch() or is_tracing()
        if not within:
            self._work.gathered.before(create_graph=bool(args[2] if len(args) > 2 else kwargs.get("create_graph")))
            if self._work.accumulation is not None:
                self._work.accumulation.check_asked(inputs, self._work.optimized.parameters())
        grads = original(outputs, inputs, *args, **kwargs)
        if within:
            return grads
        self._work.gathered.show_again()
        for group in (*self._work.inside, *([self._work.group] if self._work.divider.divided else [])):
            grads = tuple(None if grad is None else averaged(grad, group) for grad in grads)
        return grads


def _scaled(losses: Sequence[torch.Tensor], factors: Sequence[Weight], grads: Any) -> Any:
    """The gradients of the losses, multiplied by the factors."""
    if all(isinstance(factor, float) and factor == 1.0 for factor in factors):
        return grads
    given = [None] * len(losses) if grads is None else [grads] if isinstance(grads, torch.Tensor) else list(grads)
    return [
        _filled(loss, factor) if grad is None else grad * factor
        for loss, grad, factor in zip(losses, given, factors, strict=True)
    ]


def _filled(loss: torch.Tensor, factor: Weight) -> torch.Tensor:
    return torch.full_like(loss, factor) if isinstance(factor, float) else torch.ones_like(loss) * factor


@torch.no_grad()
def _multiply(parameters: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply the gradients of one backward. A parameter may be listed twice."""
    for parameter in dict.fromkeys(parameters):
        if parameter.grad is not None:
            parameter.grad *= factor


def creates_graph(_retain: Any = None, create_graph: bool = False, *_: Any, **kwargs: Any) -> bool:
    """The value of ``create_graph`` in the arguments of ``backward``."""
    return bool(kwargs.get("create_graph", create_graph))
