"""Activation checkpointing: the activations in each repeated block are recomputed in backward instead of stored.

It is applied in place (``torch.distributed._composable.checkpoint``), before sharding, so names do not change.
Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, https://arxiv.org/abs/1604.06174.
"""

from __future__ import annotations

from torch import nn

from ...protocol.errors import StrategyError
from ...protocol.options.strategy import chosen
from ...torch_private.places import checkpoint_in_place
from ..core import blocks
from ..core.context import ParallelContext


def check(model: nn.Module, context: ParallelContext) -> None:
    """Raise ``StrategyError`` for a model without blocks to checkpoint."""
    if not of(model, context):
        raise StrategyError(
            f"{type(model).__name__} has no repeated block whose activations could be computed again",
            "leave --activation-checkpointing out, or call torch.utils.checkpoint.checkpoint in the model's forward",
        )


def apply(model: nn.Module, context: ParallelContext) -> None:
    """Checkpoint every repeated block. The recomputation draws the same dropout masks."""
    for block in of(model, context):
        checkpoint_in_place(block)


def of(model: nn.Module, context: ParallelContext) -> list[nn.Module]:
    """The repeated blocks, or the modules of the classes that ``transformer_layer_cls_to_wrap`` names."""
    names = chosen(context.plan, "transformer_layer_cls_to_wrap")
    return blocks.of_classes(model, names) if names else blocks.repeated(model)
