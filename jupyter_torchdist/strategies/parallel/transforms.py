"""What is changed inside a model, by the automatic and by the explicit way."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..core.context import ParallelContext
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


def divisions(setting: ParallelContext) -> list[tuple[str, Any]]:
    """What divides layers or sequences over ranks here: the mesh's dimension, and its module."""
    return [(one, part) for one, part in (("cp", context_parallel), ("tp", tensor)) if setting.plan.degree(one) > 1]
