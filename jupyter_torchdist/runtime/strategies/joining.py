"""Losses of loops that have their part of each batch: what a rank's counts with, and the whole batch's in its place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...protocol.errors import StrategyError
from ..autolog import UNSCALED
from .divided import Added, targets_of
from .shares import Rows as Share

Weight = float | torch.Tensor
"""What a rank's loss counts with in the whole batch's."""


@dataclass(frozen=True)
class Joined:
    """A loss on its way to all ranks. ``guess``: see ``Joining``."""

    weight: Weight
    values: list[torch.Tensor]
    sent: torch.Tensor
    work: Any
    counted: bool
    guess: float | None = None


class Joining:
    """Joins the ranks' losses: one all-reduce each, sent before the backward and taken after it, on every rank.

    So no ``item()`` waits, and no backward does, but for a cross entropy, whose targets have to be counted (some may
    be ignored): the number of the batch before is taken in its place, where gradients may be multiplied afterwards by
    what was wrong with it, which is the same on all ranks. On GPUs waiting stops no processor, and nothing is guessed.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._targets: float | None = None  # of the batch before

    def send(self, loss: torch.Tensor, way: Added, share: Share, *, may_guess: bool) -> Joined:
        """Begin to join ``loss``. ``may_guess``: the gradients of its backward can be multiplied afterwards."""
        values = values_of(loss)
        if not way.counted:
            weight: Weight = share.weight if way.mean else 1.0
            sent = torch.stack([value.detach() for value in values]) * weight
            return Joined(weight, values, sent, self._send(sent), counted=False)
        mine = targets_of(loss).expand_as(loss)
        guess = self._targets if may_guess and loss.device.type == "cpu" else None
        totals = [torch.where(mine == 0, 0.0, value.detach() * mine) for value in values]  # no targets: 0 / 0
        sent = torch.stack([mine, mine.new_tensor(guess is not None), *totals])
        work = self._send(sent)
        if guess is None:
            work.wait()
        return Joined(mine / (guess or sent[0]), values, sent, work, counted=True, guess=guess)

    def _send(self, numbers: torch.Tensor) -> Any:
        return dist.all_reduce(numbers, group=self._group, async_op=True)

    def finish(self, joined: Joined) -> float:
        """The whole batch's loss in the user's tensors; by what the gradients are to be multiplied.

        Raises ``StrategyError`` when some ranks guessed and others waited.
        """
        joined.work.wait()
        whole, factor = joined.sent, 1.0
        if joined.counted:
            whole = joined.sent[2:] / joined.sent[0]
            if whole.device.type == "cpu":
                factor = self._factor(joined)
        for value, one in zip(joined.values, whole.unbind(), strict=True):
            value.data.copy_(one)
        return factor

    def _factor(self, joined: Joined) -> float:
        targets, guesses = joined.sent[:2].tolist()
        self._targets = targets or None
        if guesses not in (0.0, self._group.size()):
            raise StrategyError(
                "gradients were there before a backward on some ranks, and not on others",
                "call zero_grad() on all ranks alike; or -O batch=whole",
            )
        if joined.guess is None:
            return 1.0
        return joined.guess / targets if targets else math.nan


def values_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """Tensors that show a loss: it, and what a GradScaler scaled."""
    source = getattr(loss, UNSCALED, None)
    return [loss] if source is None else [loss, source]
