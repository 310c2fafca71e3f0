"""``nn.DataParallel`` in a cell: passed over, since the strategy divides the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .context import ParallelContext
from .patches import Patches


def install(patches: Patches, context: ParallelContext) -> None:
    """While user code runs, ``nn.DataParallel`` calls its module on this rank's device only."""

    def build(
        original: Callable[..., Any], wrapper: nn.DataParallel[Any], module: nn.Module, *_: Any, **__: Any
    ) -> None:
        context.say("nn.DataParallel is passed over: the strategy divides each batch among the ranks")
        own = None if context.device.index is None else [context.device.index]
        original(wrapper, module, own)

    def forward(_original: Callable[..., Any], wrapper: nn.DataParallel[Any], *args: Any, **kwargs: Any) -> Any:
        return wrapper.module(*args, **kwargs)

    patches.around(nn.DataParallel, "__init__", build)
    patches.around(nn.DataParallel, "forward", forward)
