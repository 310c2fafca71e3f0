"""May the samples of a batch go through the model in microbatches? As ``divided`` asks it of the ranks' parts."""

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
from ..step.ways import Way
from .checks import microbatches


class _Parts:
    """Stands where ``Divider`` has the group of ranks among which a batch is divided: this rank tries one part."""

    def __init__(self, parts: int, group: dist.ProcessGroup) -> None:
        self._parts, self._own = parts, group.rank() % parts

    def size(self) -> int:
        return self._parts

    def rank(self) -> int:
        return self._own


class _Trial(Divider):
    """Finds how the outputs of microbatches make the whole batch's."""

    def __init__(self, parts: int, group: dist.ProcessGroup, *, trusted: bool) -> None:
        super().__init__(_Parts(parts, group), whole=False, trusted=trusted)  # type: ignore[arg-type]
        self._ranks = group

    def _agreed(self, mine: tuple[Way, ...] | Refused) -> tuple[Way, ...] | Refused:
        return agreed(mine, self._ranks, "parts of the batch")

    def found(
        self, forward: Callable[..., Any], root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Way, ...] | Refused | None:
        """None where there is no batch."""
        share = self._share(args, kwargs)
        if share is None:
            return None
        dims = in_front(tensors_in((args, kwargs)), share.total)
        return self._agreed(self._tried(forward, root, (args, kwargs), share, dims))


def ways_of_microbatches(
    forward: Callable[..., Any],
    root: nn.Module,
    context: ParallelContext,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    samples: int | None,
) -> tuple[Way, ...] | None:
    """How the microbatches' outputs make the batch's; None where it goes through in one piece, which is said.

    ``samples``: of the batch, where it is known. All ranks of the pipeline call it, with the whole model. Raises
    ``StrategyError`` where ``-O microbatches`` asks for what cannot be.
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
    """Say why batches are not cut. Raises ``StrategyError`` where ``-O microbatches`` asks for it."""
    if "microbatches" in context.plan.options and microbatches(context) > 1:
        raise StrategyError(
            f"{type(root).__name__} cannot be given a batch in microbatches: {reason}",
            "use -O microbatches=1, which makes the stages wait for each other; -O trust_model=1 cuts it unchecked",
        )
    context.say(f"batches go through the stages in one piece, so the stages wait for each other: {reason}")
