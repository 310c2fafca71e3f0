"""What ``td.prepare`` accepts and refuses, and the messages for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from ..protocol.errors import StrategyError
from ..protocol.options.strategy import chosen
from ..protocol.strategy import StrategyPlan
from .core import agreement, loading, optimizers
from .core.agreement import of_every_rank
from .core.context import ParallelContext
from .loop import prepared_loader
from .parallel import replicate, transforms, zero1

_OF_THE_AUTOMATIC_WAY = ("batch", "model", "trust_loss", "trust_model")


def check_plan(plan: StrategyPlan) -> None:
    """Raise ``StrategyError`` for options that do not work with ``td.prepare``."""
    if plan.degree("pp") > 1:
        raise StrategyError(
            "td.prepare cannot cut a model into the stages of a pipeline: only the first batch shows where to cut",
            "leave td.prepare out of the cell: --strategy pp works with the plain training loop",
        )
    if plan.options.get("uneven_inputs"):
        raise StrategyError(
            "-O uneven_inputs and td.prepare: with a prepared loader every rank has the same number of batches; in "
            "other loops td.prepare cannot know when a rank has no batch left and must wait for the others",
            "prepare the loader and leave -O uneven_inputs out; or --strategy none, DistributedDataParallel and "
            "torch.distributed.algorithms.Join around the loop",
        )
    parts = ("ddp", "fsdp", "hsdp", "tp", "cp")
    asked = [f"--strategy {name}" for name in plan.name.split("+") if name not in parts]
    asked += ["--checkpoint"] if plan.checkpoint else []
    asked += ["--grad-accumulation"] if plan.grad_accumulation > 1 else []
    asked += [f"-O {name}" for name in _OF_THE_AUTOMATIC_WAY if name in plan.options]
    if asked:
        raise StrategyError(
            f"{', '.join(asked)}: only for cells that do not call td.prepare, and this cell calls it",
            "leave out one of the two; td.save and td.load work with what was prepared",
        )


def check(
    things: Sequence[Any], context: ParallelContext, prepared: Sequence[nn.Module], loaders: prepared_loader.Loaders
) -> None:
    """Raise ``StrategyError`` for things that cannot be added to the ``prepared`` models. All ranks must call it."""
    kinds = of_every_rank([type(thing).__name__ for thing in things])
    other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is not None:
        raise StrategyError(
            f"the ranks prepare different things: {kinds[0]} on rank 0, {kinds[other]} on rank {other}",
            "call td.prepare on all ranks, with the same arguments",
        )
    models = [*prepared]
    for thing in things:
        if isinstance(thing, nn.Module):
            _check_model(thing, models, context)
            models.append(thing)
        elif isinstance(thing, DataLoader):
            if thing in loaders or sum(thing is other for other in things) > 1:
                raise StrategyError("this DataLoader is prepared already", "prepare each loader once")
            prepared_loader.check(thing)
        elif not isinstance(thing, (torch.optim.Optimizer, LRScheduler, ReduceLROnPlateau)):
            raise StrategyError(
                f"td.prepare takes models, optimizers, DataLoaders and schedulers, and was given "
                f"{type(thing).__name__}",
                "leave it out: losses, gradient scalers, data sets and tensors need no preparing",
            )
    for thing in things:
        optimizer = getattr(thing, "optimizer", thing)
        if isinstance(optimizer, torch.optim.Optimizer):
            _check_optimizer(optimizer, models, context)


def _check_model(model: nn.Module, before: Sequence[nn.Module], context: ParallelContext) -> None:
    name = type(model).__name__
    parameters = list(model.parameters())
    if not parameters:
        raise StrategyError(
            f"{name} has no parameters: there is nothing to distribute",
            "prepare the models that are trained; a loss or an activation needs no preparing",
        )
    for other in before:
        if other is model:
            raise StrategyError(f"this {name} is prepared already", "prepare each model once")
        known = {id(parameter) for parameter in other.parameters()}
        if any(id(parameter) in known for parameter in parameters):
            raise StrategyError(
                f"{name} shares parameters with the {type(other).__name__} that is prepared",
                "prepare one module that holds both, or the outer one alone",
            )
    agreement.check_untouched(model)
    agreement.same_on_all_ranks(model, context)
    transforms.check(model, context)
    if context.plan.degree("dp_shard") == 1 and context.data_ranks > 1:
        replicate.check(model, context)


def _check_optimizer(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], context: ParallelContext) -> None:
    known = {id(parameter) for model in models for parameter in model.parameters()}
    strange = [parameter for parameter in loading.trained_by(optimizer) if id(parameter) not in known]
    if strange:
        raise StrategyError(
            f"{type(optimizer).__name__} trains {len(strange)} parameters that are in no prepared model (the first "
            f"has the shape {list(strange[0].shape)}): their gradients would be different on every rank",
            "prepare the model that holds them, in the same call or before; make a parameter without a model a "
            "parameter of the prepared one",
        )
    optimizers.check(optimizer, context.plan.degree("dp_shard") > 1 or context.plan.degree("tp") > 1)
    if chosen(context.plan, "zero1"):
        zero1.check(optimizer)


def described(things: Sequence[Any], context: ParallelContext) -> list[str]:
    """A description of what is done, in at most two lines."""
    data, lines = context.data_ranks, []
    models = [
        f"{type(thing).__name__} ({sum(one.numel() for one in thing.parameters()):,} parameters)"
        for thing in things
        if isinstance(thing, nn.Module)
    ]
    if models:
        name, ranks = context.plan.name, dist.get_world_size()
        lines.append(f"prepared for {name} on {ranks} ranks: {', '.join(models)}")
    if any(isinstance(thing, DataLoader) for thing in things):
        lines.append(
            f"each of {data} data ranks loads its part of every batch; a loss is the loss of this rank's samples, "
            "td.reduce_mean(loss) is the loss of the whole batch"
            if data > 1
            else "every rank loads whole batches: no dimension of the mesh divides them"
        )
    return lines
