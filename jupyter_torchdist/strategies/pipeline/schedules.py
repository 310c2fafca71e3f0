"""The order in which each rank of a pipeline works on microbatches, for every schedule; and which rank has which stage.

Orders with several stages a rank come from ``torch.distributed.pipelining.schedules``: its classes are built with
stand-ins of stages, and their tables are read. ``gpipe`` (Huang et al., 2019, https://arxiv.org/abs/1811.06965) and
``1f1b`` (Narayanan et al., 2019, https://arxiv.org/abs/1806.03377) are implemented here, because torch's tables of
these two are only for visualisation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import SimpleNamespace
from typing import Any

from ...protocol.errors import StrategyError

WHOLE_FORWARD = ("gpipe", "looped_bfs")
"""Schedules with all forwards before all backwards: any loss can be computed between them."""

V_SHAPED = ("zbv", "dualpipev")
"""Schedules whose stages go down the ranks and up again: the first rank has the first and the last stage."""

LOOPED = ("looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", *V_SHAPED)
"""Schedules with several stages a rank."""

_CLASSES = {
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


class Kind(Enum):
    """The kind of work on one microbatch in one stage."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUTS = "I"
    """The part of the backward that computes gradients for the previous stage."""
    WEIGHTS = "W"
    """The rest of the backward: the gradients of the stage's own parameters."""


_KINDS = {
    "FORWARD": Kind.FORWARD,
    "FULL_BACKWARD": Kind.BACKWARD,
    "BACKWARD_INPUT": Kind.INPUTS,
    "BACKWARD_WEIGHT": Kind.WEIGHTS,
}
"""Our kinds by torch's names (``_ComputationType``)."""


@dataclass(frozen=True)
class Action:
    """One piece of work of a rank."""

    kind: Kind
    stage: int
    microbatch: int


Orders = Sequence[Sequence[Action]]
"""The actions of each rank, in order."""


@dataclass(frozen=True)
class StageLayout:
    """``stages`` of a model on ``ranks``."""

    schedule: str
    ranks: int
    stages: int

    def rank_of(self, stage: int) -> int:
        """The rank that computes a stage."""
        if self.schedule in V_SHAPED and stage >= self.ranks:
            return self.stages - 1 - stage
        return stage % self.ranks

    def own(self, rank: int) -> list[int]:
        """The stages of a rank, in order."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    @property
    def last_rank(self) -> int:
        """The rank that has the outputs and the loss."""
        return self.rank_of(self.stages - 1)

    def forwards(self, microbatches: int) -> Orders:
        """All forwards, for a passage without a backward or with a later one."""
        return [
            [Action(Kind.FORWARD, stage, number) for stage in self.own(rank) for number in range(microbatches)]
            for rank in range(self.ranks)
        ]

    def backwards(self, microbatches: int) -> Orders:
        """All backwards, after ``forwards``."""
        return [
            [Action(Kind.BACKWARD, one.stage, one.microbatch) for one in reversed(order)]
            for order in self.forwards(microbatches)
        ]

    def inside(self, microbatches: int) -> Orders:
        """Forwards and backwards as the schedule mixes them. Raises ``StrategyError`` if it cannot."""
        return _inside(self, microbatches)


def stages_a_rank(schedule: str, ranks: int, balance: Any, marked: int) -> int:
    """How many stages a rank has: set by ``balance`` or ``td.stage``; else 2 if the schedule allows several.

    ``marked``: the number of stages marked by ``td.stage``. Raises ``StrategyError`` for an impossible number.
    """
    said = len(balance) if isinstance(balance, tuple) else marked if balance == "manual" else 0
    if schedule not in LOOPED:
        return 1
    each = said // ranks if said else 2
    if said % ranks or (schedule in V_SHAPED and each != 2) or each < 1:
        wanted = f"{2 * ranks}" if schedule in V_SHAPED else f"a multiple of {ranks}"
        raise StrategyError(
            f"schedule={schedule} on {ranks} ranks needs {wanted} stages, there are {said}",
            "give as many stages by -O balance or td.stage(i), or leave -O balance out",
        )
    return each


def messages(layout: StageLayout, order: Sequence[Action], receiver: int) -> Iterator[tuple[int, Action]]:
    """The messages from a rank to ``receiver``, in order: after how many of its actions, and which action needs it."""
    for done, action in enumerate(order, 1):
        needed = _next(layout, action)
        if needed is not None and layout.rank_of(needed.stage) == receiver != layout.rank_of(action.stage):
            yield done, needed


def taken(order: Sequence[Action]) -> Iterator[Action]:
    """The actions that may need a message, as messages name them: a split backward needs it in its first part."""
    for action in order:
        if action.kind is not Kind.WEIGHTS:
            yield replace(action, kind=Kind.FORWARD if action.kind is Kind.FORWARD else Kind.BACKWARD)


def _next(layout: StageLayout, action: Action) -> Action | None:
    """The action of a neighbouring stage that waits for this one's result; for a split backward its first part."""
    if action.kind is Kind.FORWARD and action.stage + 1 < layout.stages:
        return Action(Kind.FORWARD, action.stage + 1, action.microbatch)
    if action.kind in (Kind.BACKWARD, Kind.INPUTS) and action.stage > 0:
        return Action(Kind.BACKWARD, action.stage - 1, action.microbatch)
    return None


@functools.lru_cache(maxsize=64)
def _inside(layout: StageLayout, microbatches: int) -> Orders:
    if layout.schedule == "1f1b":
        return [_one_forward_one_backward(rank, layout.ranks, microbatches) for rank in range(layout.ranks)]
    from torch.distributed.pipelining import schedules  # takes seconds: it imports torch's tracer

    each = layout.stages // layout.ranks
    stages = [
        SimpleNamespace(num_stages=layout.stages, group_size=layout.ranks, group_rank=0, submod=None)
        for _ in range(each)
    ]
    try:
        built = getattr(schedules, _CLASSES[layout.schedule])(stages, microbatches)
    except ValueError as error:
        raise StrategyError(
            f"schedule={layout.schedule} cannot take {microbatches} microbatches on {layout.ranks} ranks: {error}",
            f"use -O microbatches={layout.stages}, batches of at least as many samples, or -O schedule=gpipe",
        ) from error
    return [list(_flat(built.pipeline_order[rank])) for rank in range(layout.ranks)]


def _flat(order: Sequence[Any]) -> Iterator[Action]:
    """Convert torch's actions to ours. Actions that may overlap are put one after the other."""
    for action in order:
        if action is None:  # a bubble
            continue
        if together := getattr(action, "sub_actions", None):
            yield from _flat(together)
        else:
            yield Action(_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """One forward for each later rank, then a forward and a backward in turn, then the remaining backwards."""
    ahead = min(ranks - 1 - rank, microbatches)
    order = [Action(Kind.FORWARD, rank, number) for number in range(ahead)]
    for number in range(microbatches):
        if ahead + number < microbatches:
            order.append(Action(Kind.FORWARD, rank, ahead + number))
        order.append(Action(Kind.BACKWARD, rank, number))
    return order
