"""Losses of loops with divided batches: the weight of each rank's loss, and the global loss that replaces it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...protocol.errors import StrategyError
from ..core.losses import UNSCALED
from ..core.scatter import BatchShard as Share
from ..step.divided import targets_of
from ..step.ways import AddedParts

Weight = float | torch.Tensor
"""The weight of a rank's loss in the loss of the global batch."""


@dataclass(frozen=True)
class BatchLoss:
    """A loss being joined over the ranks. ``guess``: see ``Joining``; ``sent`` None: sent with the gradients."""

    weight: Weight
    values: list[torch.Tensor]
    sent: torch.Tensor | None
    work: Any
    counted: bool
    guess: float | None = None


class Joining:
    """Joins the ranks' losses: added up with the gradients, or by an all-reduce each, sent before the backward.

    So neither ``item()`` nor the backward waits. The exception is a cross entropy, whose targets must be counted,
    because some may be ignored. It uses the count of the previous batch as a guess, if the gradients can be multiplied
    afterwards by the correction, the same on all ranks. On GPUs waiting does not block the CPU: nothing is guessed.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._targets: float | None = None  # count of the previous batch

    def send(
        self,
        loss: torch.Tensor,
        way: AddedParts,
        share: Share,
        *,
        may_guess: bool,
        carry: Callable[[Sequence[float]], None] | None = None,
    ) -> BatchLoss:
        """Begin to join ``loss``. ``may_guess``: the gradients of its backward can be multiplied afterwards.

        ``carry`` adds up numbers over the ranks; ``finish`` is given the sums.
        """
        values = values_of(loss)
        if not way.counted:
            weight = share.weight if way.mean else 1.0
            if carry is not None:
                carry([float(value.detach()) * weight for value in values])
                return BatchLoss(weight, values, None, None, counted=False)
            sent = torch.stack([value.detach() for value in values]) * weight
            return BatchLoss(weight, values, sent, self._send(sent), counted=False)
        mine = targets_of(loss).expand_as(loss)
        guess = self._targets if may_guess and loss.device.type == "cpu" else None
        if carry is not None and guess is not None:
            count = float(mine)
            carry([count, 1.0, *(float(value.detach()) * count if count else 0.0 for value in values)])
            return BatchLoss(count / guess, values, None, None, counted=True, guess=guess)
        totals = [torch.where(mine == 0, 0.0, value.detach() * mine) for value in values]  # no targets: 0 / 0
        sent = torch.stack([mine, mine.new_tensor(guess is not None), *totals])
        work = self._send(sent)
        if guess is None:
            work.wait()
        return BatchLoss(mine / (guess or sent[0]), values, sent, work, counted=True, guess=guess)

    def _send(self, numbers: torch.Tensor) -> Any:
        return dist.all_reduce(numbers, group=self._group, async_op=True)

    def finish(self, joined: BatchLoss, carried: Sequence[float] = ()) -> float:
        """Write the global loss into the user's tensors. Returns the factor for the gradients.

        Raises ``StrategyError`` when some ranks guessed and others waited.
        """
        if joined.sent is None:
            return self._take(joined, list(carried))
        joined.work.wait()
        if joined.sent.device.type == "cpu":
            return self._take(joined, joined.sent.tolist())
        whole = joined.sent[2:] / joined.sent[0] if joined.counted else joined.sent
        for value, one in zip(joined.values, whole.unbind(), strict=True):
            value.data.copy_(one)
        return 1.0

    def _take(self, joined: BatchLoss, numbers: list[float]) -> float:
        factor = 1.0
        if joined.counted:
            targets, guesses, *totals = numbers
            factor = self._factor(joined, targets, guesses)
            numbers = [total / targets if targets else math.nan for total in totals]
        for value, one in zip(joined.values, numbers, strict=False):  # other numbers may follow
            value.data.fill_(one)
        return factor

    def _factor(self, joined: BatchLoss, targets: float, guesses: float) -> float:
        self._targets = targets or None
        if guesses not in (0.0, self._group.size()):
            raise StrategyError(
                "before this backward some ranks had gradients and others had none",
                "call zero_grad() in the same steps on every rank; or use -O batch=whole",
            )
        if joined.guess is None:
            return 1.0
        return joined.guess / targets if targets else math.nan


def values_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that show a loss: the loss itself, and the unscaled loss if a GradScaler scaled it."""
    source = getattr(loss, UNSCALED, None)
    return [loss] if source is None else [loss, source]
