"""The changes inside a model that the automatic and the explicit way share."""

from __future__ import annotations

from torch import nn

from ..core.context import Division, ParallelContext
from ..step import batchnorm
from . import activations, context_parallel, fsdp, tensor


def check(model: nn.Module, context: ParallelContext) -> None:
    """Raise ``StrategyError`` for a model that cannot be changed as the plan says, before anything is changed."""
    batchnorm.check(model)
    if context.plan.activation_checkpointing:
        activations.check(model, context)
    for _, parallelism in divisions(context):
        parallelism.check(model, context)
    if context.plan.degree("dp_shard") > 1:
        fsdp.check(model, context)


def divisions(context: ParallelContext) -> list[tuple[str, Division]]:
    """The kinds of parallelism in the plan that divide layers or sequences, each with its mesh dimension."""
    every: tuple[tuple[str, Division], ...] = (("cp", context_parallel), ("tp", tensor))
    return [(dimension, division) for dimension, division in every if context.plan.degree(dimension) > 1]
