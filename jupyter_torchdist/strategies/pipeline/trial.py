"""Whether a batch may go through the model in microbatches. ``divided`` decides the same for the ranks' parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from ...protocol.errors import StrategyError
from ..core.context import ParallelContext
from ..core.scatter import tensors_in
from ..step.divided import Divider, agreed
from ..step.placing import in_front
from ..step.trial import Refused
from ..step.ways import Found, Way
from .checks import microbatches


class _Parts:
    """In place of the process group of a ``Divider``: each rank tries one part of the batch."""

    def __init__(self, parts: int, group: dist.ProcessGroup) -> None:
        self._parts, self._own = parts, group.rank() % parts

    def size(self) -> int:
        return self._parts

    def rank(self) -> int:
        return self._own


class _Trial(Divider):
    """Finds how the outputs of microbatches give the outputs of the whole batch."""

    def __init__(self, parts: int, group: dist.ProcessGroup, *, trusted: bool) -> None:
        super().__init__(_Parts(parts, group), whole=False, trusted=trusted)  # type: ignore[arg-type]
        self._ranks = group

    def _agreed(self, mine: Found | Refused) -> Found | Refused:
        return agreed(mine, self._ranks, "parts of the batch")

    def found(
        self, forward: Callable[..., Any], root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Way, ...] | Refused | None:
        """How outputs are joined, or why they cannot be; None if there is no batch."""
        share = self._share(args, kwargs)
        if share is None:
            return None
        dims = in_front(tensors_in((args, kwargs)), share.total)
        found = self._agreed(self._tried(forward, root, (args, kwargs), share, dims))
        return found if isinstance(found, Refused) else found.ways


def ways_of_microbatches(
    forward: Callable[..., Any],
    root: nn.Module,
    context: ParallelContext,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    samples: int | None,
) -> tuple[Way, ...] | None:
    """How the microbatches' outputs give the batch's outputs; None if the batch is not cut (the user is told why).

    ``samples``: the size of the batch, if known. All ranks of the pipeline must call it, with the whole model. Raises
    ``StrategyError`` if ``-O microbatches`` is set but not possible.
    """
    sizes = [tensor.size(0) for tensor in tensors_in((args, kwargs)) if tensor.dim()]
    total = samples if samples in sizes else next(iter(sizes), None)
    parts = min(microbatches(context), total or 1)
    if parts == 1:
        return None
    trial = _Trial(parts, context.mesh["pp"].get_group(), trusted=bool(context.plan.options.get("trust_model")))
    trial.samples = total
    found = trial.found(forward, root, args, kwargs)
    if isinstance(found, Refused):
        in_one_piece(root, context, found.reason)
        return None
    return found


def in_one_piece(root: nn.Module, context: ParallelContext, reason: str) -> None:
    """Say why batches are not cut. Raises ``StrategyError`` if ``-O microbatches`` asks for it."""
    if "microbatches" in context.plan.options and microbatches(context) > 1:
        raise StrategyError(
            f"{type(root).__name__} cannot be given a batch in microbatches: {reason}",
            "use -O microbatches=1, which makes the stages wait for each other",
        )
    context.say(f"batches go through the stages in one piece, so the stages wait for each other: {reason}")
