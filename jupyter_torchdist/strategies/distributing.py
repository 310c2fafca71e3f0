"""Makes a root module distributed: its layers, states and optimizers. The automatic way uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import nn

from ..protocol.options.strategy import chosen
from .core import agreement, hooks, loading, optimizers
from .core.context import ParallelContext
from .deepspeed.engine import Engine
from .parallel import activations, compiling, fsdp, precision, replicate, transforms, zero1
from .pipeline import checks, stages
from .sharded import aliases
from .sharded.forward_writes import keep_after_forwards
from .sharded.trained_parameters import Optimized
from .sharded.unsharded import Unsharded
from .step import accumulating, averaging, batchnorm, rewriting
from .step.averaging import Averaging, How
from .step.divided import Divider
from .step.equivalence import Equivalence
from .step.finite import Guard
from .step.ways import Way


class Distributor:
    """Distributes root modules and keeps track of them."""

    def __init__(
        self,
        context: ParallelContext,
        optimized: Optimized,
        models: list[nn.Module],
        engine: Engine | None,
        guard: Guard,
    ) -> None:
        """``models``: a list that receives the models that are sharded or divided inside."""
        self._guard = guard
        self.context, self.group, self.optimized, self.engine = context, context.data_group, optimized, engine
        self.is_divided_inside = any(context.plan.degree(one) > 1 for one in ("tp", "cp", "pp"))
        self.sharded = context.plan.degree("dp_shard") > 1 or context.plan.degree("tp") > 1
        options, self.accumulation = context.plan.options, accumulating.of(context.plan)
        self.divider = Divider(
            self.group,
            self.accumulation,
            context.proving,
            whole=options.get("model") == "whole",
            trusted=bool(options.get("trust_model")),
            anywhere=not self.is_divided_inside,
        )
        self.averaging = Averaging(self.group, How.of(context.plan))
        self.roots: dict[int, nn.Module] = {}
        self.models, self.gathered = models, Unsharded(models)
        self.inside: list[dist.ProcessGroup] = []
        """Groups whose ranks compute different layers or tokens of one forward."""
        self.pipelines: list[stages.Pipeline] = []
        self.shared: list[aliases.Memory] = []
        """Memory of the cell that was the memory of parameters, too, before they were sharded."""

    def distribute(
        self,
        root: nn.Module,
        cut: Callable[[], None],
        hold: Callable[[], Equivalence],
        rewrites: Callable[[], rewriting.Rewritten],
    ) -> None:
        """``cut`` makes stages of ``root``, if the plan has ``pp``; ``hold`` measures ``root`` before it changes.

        ``rewrites`` finds which parameters its forward writes.
        """
        context = self.context
        agreement.same_on_all_ranks(root, context)
        before, name = optimizers.by_name(root), type(root).__name__
        count = sum(parameter.numel() for parameter in root.parameters())
        self._check(root)
        found = rewrites() if self._may_lose_writes else rewriting.Rewritten()
        rewriting.check(root, found, context)
        if self.sharded:
            self.averaging.end()  # its parameters are about to be replaced by shards
        names = [(model, optimizers.by_name(model)) for model in (root, *self.optimized.copies_of(root))]
        shared = self._shared_memory([one for _, known in names for one in known.values()])
        self._divide_inside([model for model, _ in names], hold)
        self.divider.shares(root, batchnorm.convert(root, context))
        if context.plan.activation_checkpointing:
            activations.apply(root, context)
        if context.plan.compile:
            compiling.apply(root, context)
        if self.sharded:
            for model, known in names:
                self._shard(model, known)
            for memory in shared:
                memory.follow(self.optimized.replaced)
            self.shared += shared
            keep_after_forwards(root, found.written)
        elif self.engine is not None:
            loading.broadcast_states(root, self.group, context.device)
            self.engine.make(root)
        else:
            loading.broadcast_states(root, self.group, context.device)
            if context.plan.degree("pp") > 1:
                cut()
            else:
                precision.apply(root, context)
            for optimizer in self.optimized if chosen(context.plan, "zero1") else ():
                zero1.apply(optimizer, self.group)
        self.optimized.distributed(before.values())
        self.roots[id(root)] = root
        self._guard.knows(root, before)
        if self.pipelines:  # the pipeline has said more
            return
        part = f"; each computes {self._computed()}" if context.data_ranks > 1 else ""
        part += accumulating.said(context.plan)
        context.say(
            f"{name} ({_much(count)} parameters) is trained by {context.plan.name} on "
            f"{dist.get_world_size()} ranks{part}"
        )

    def _shared_memory(self, parameters: Sequence[nn.Parameter]) -> list[aliases.Memory]:
        """The memory that the cell shares with parameters which are about to get other memory."""
        if not self.sharded and self.engine is None and self.context.plan.degree("pp") == 1:
            return []
        shared = aliases.shared_with(parameters)
        if shared and not self.sharded:
            names = ", ".join(aliases.names_of(one for memory in shared for one in memory.tensors))
            self.context.say(
                f"{self.context.plan.name} gives parameters other memory than {names or 'tensors of the cell'}: what "
                "is there stays as it is now, and writing to it does not change the model (use the parameters "
                "themselves)"
            )
        return shared

    @property
    def _may_lose_writes(self) -> bool:
        """Whether a forward's writes to parameters could be lost or repeated: not with a whole copy on each rank."""
        plan = self.context.plan
        repeats = self.accumulation is not None or plan.activation_checkpointing
        return self.sharded or self.engine is not None or plan.degree("pp") > 1 or bool(repeats)

    def _computed(self) -> str:
        """Which part of a batch a rank computes, for a message."""
        return "the whole batch" if self.context.plan.options.get("model") == "whole" else "its part of every batch"

    def cut(
        self,
        root: nn.Module,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        ways: tuple[Way, ...] | None,
        within: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Cut ``root`` into pipeline stages. Their forwards and backwards run in the context ``within``."""
        staged = stages.Pipeline(root, self.context, lambda: self.divider.samples, within)
        staged.cut(*inputs, ways)
        self.optimized.follow(staged.replaced, (), shown=False)
        for optimizer in self.optimized:
            staged.forget_others(optimizer)
        self.pipelines.append(staged)

    def _divide_inside(self, models: Sequence[nn.Module], hold: Callable[[], Equivalence]) -> None:
        """Divide layers or sequences over ranks. Outputs and gradients of the first one, the root, must not change."""
        context = self.context
        for dimension, parallelism in transforms.divisions(context):
            held = hold()
            for model in models:
                parallelism.apply(model, context)
            held.compare(dimension, parallelism.explain)
            if (group := context.mesh[dimension].get_group()) not in self.inside:
                self.inside.append(group)
            if not self.sharded:
                self.models += models

    def _shard(self, model: nn.Module, before: dict[str, nn.Parameter]) -> None:
        context = self.context
        if context.plan.degree("dp_shard") > 1:
            fsdp.apply(model, context)
        elif context.data_ranks > 1:
            replicate.apply(model, context)
        else:
            precision.apply(model, context)
        self.optimized.follow(optimizers.replaced(before, model), (before,))
        self.models.append(model)
        self.gathered.begin_forward()

    def _check(self, root: nn.Module) -> None:
        """Raise ``StrategyError`` before anything is changed."""
        context = self.context
        agreement.check_grown(root, self.models, self.optimized.pending)
        averaging.check(root)
        tokens = context.plan.degree("cp") > 1
        if self.divider.dividing or tokens:
            hooks.check_modules(root, tokens=tokens)
        accumulating.check(root, context)
        if self.engine is not None:
            self.engine.check(root)
            hooks.check_parameters(root)
        if context.plan.degree("pp") > 1:
            checks.check(root, context, list(self.optimized))
        transforms.check(root, context)
        for optimizer in self.optimized:
            optimizers.check(optimizer, self.sharded)


def _much(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def nothing_was_distributed(*, untrained: bool, backward: bool) -> str:
    """What is said at the end of a cell. ``untrained``: an optimizer has parameters of no model that was called."""
    if untrained:
        return "nothing was distributed: no module with optimized parameters was called to be trained"
    why = "no optimizer of torch.optim trains a module" if backward else "the cell calls no backward()"
    return f"nothing was distributed: {why}; every rank did all the work"
