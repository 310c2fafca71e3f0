"""Checks for everything that a pipeline does not support, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from ...protocol.errors import StrategyError
from ...protocol.options.strategy import chosen
from ...torch_private.places import BatchNorm
from ..core.agreement import check_not_scripted, check_untouched
from ..core.context import ParallelContext
from ..core.patches import Patches
from . import reads
from .schedules import WHOLE_FORWARD

_WHOLE_MODEL_OPTIMIZERS = (torch.optim.LBFGS,)


def check(model: nn.Module, context: ParallelContext, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
    """Raise ``StrategyError`` for a model, plan or optimizer that a pipeline does not support."""
    check_untouched(model)
    for dimension in ("dp_shard", "tp", "cp"):
        if context.plan.degree(dimension) > 1:
            raise StrategyError(
                f"a pipeline whose stages are divided further ({dimension}={context.plan.degree(dimension)}) "
                "is not supported",
                "use pp with ddp (--strategy ddp+pp -O pp=2), which adds whole pipelines",
            )
    if chosen(context.plan, "zero1"):
        raise StrategyError("zero1 and a pipeline do not go together", "leave one of them out")
    if context.plan.activation_checkpointing:
        raise StrategyError(
            "--activation-checkpointing and a pipeline do not go together",
            "leave it out, or call torch.utils.checkpoint.checkpoint within the blocks",
        )
    if context.plan.compile:
        raise StrategyError("--compile and a pipeline do not go together", "leave one of them out")
    schedule = chosen(context.plan, "schedule")
    if schedule not in WHOLE_FORWARD and context.data_ranks > 1:
        raise StrategyError(
            f"schedule={schedule} needs the loss of each microbatch, but with several pipelines beside each other "
            "the loss is computed over all of them",
            f"use -O schedule={' or '.join(WHOLE_FORWARD)}, or no ddp beside pp",
        )
    check_not_scripted(model.modules())
    reads.check(model)
    normalising = next((name for name, part in model.named_modules() if isinstance(part, BatchNorm)), None)
    if normalising is not None and microbatches(context) > 1:
        raise StrategyError(
            f"{normalising} normalises over the batch, and a microbatch is only a part of the batch",
            "use -O microbatches=1, or layers that normalise each sample (LayerNorm, GroupNorm)",
        )
    for optimizer in optimizers:
        if isinstance(optimizer, _WHOLE_MODEL_OPTIMIZERS):
            raise StrategyError(
                f"{type(optimizer).__name__} needs all gradients in one place, a stage has its own",
                "use --strategy ddp, or another optimizer",
            )


@contextmanager
def no_reentrant_checkpoints() -> Iterator[None]:
    """Raise ``StrategyError`` for reentrant checkpoints: without a graph no gradient reaches a stage's boundary."""

    def refuse(*_: Any) -> NoReturn:
        raise StrategyError(
            "the model's forward calls torch.utils.checkpoint.checkpoint with use_reentrant=True, which keeps no graph "
            "that a pipeline could follow",
            "use_reentrant=False (of Hugging Face's models: gradient_checkpointing_enable("
            'gradient_checkpointing_kwargs={"use_reentrant": False}))',
        )

    patches = Patches()
    patches.give(CheckpointFunction, "apply", refuse)
    try:
        yield
    finally:
        patches.undo()


def microbatches(context: ParallelContext) -> int:
    """The number of microbatches: ``-O microbatches``, or the degree of ``pp``."""
    return int(chosen(context.plan, "microbatches") or context.plan.degree("pp"))
