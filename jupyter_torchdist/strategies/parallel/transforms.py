"""What is changed inside a model, by the automatic and by the explicit way."""

from __future__ import annotations

from torch import nn

from ..core.context import Division, ParallelContext
from ..step import batchnorm
from . import activations, context_parallel, fsdp, tensor


def check(model: nn.Module, setting: ParallelContext) -> None:
    """Raise ``StrategyError`` for a model that cannot be changed as the plan says, before anything is."""
    batchnorm.check(model)
    if setting.plan.activation_checkpointing:
        activations.check(model, setting)
    for _, parallelism in divisions(setting):
        parallelism.check(model, setting)
    if setting.plan.degree("dp_shard") > 1:
        fsdp.check(model, setting)


def divisions(setting: ParallelContext) -> list[tuple[str, Division]]:
    """What divides layers or sequences over ranks here, with its dimension of the mesh."""
    every: tuple[tuple[str, Division], ...] = (("cp", context_parallel), ("tp", tensor))
    return [(dimension, division) for dimension, division in every if setting.plan.degree(dimension) > 1]
