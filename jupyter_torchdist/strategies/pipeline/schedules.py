"""In which order each rank of a pipeline works on microbatches, for every schedule, and which rank has which stage.

The orders with several stages a rank are those of ``torch.distributed.pipelining.schedules``, whose classes are built
here with stand-ins of stages and asked for their tables. ``gpipe`` (Huang et al., 2019,
https://arxiv.org/abs/1811.06965) and ``1f1b`` (Narayanan et al., 2019, https://arxiv.org/abs/1806.03377) are written
out: torch's tables of these two are made for pictures.
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
"""All forwards come before all backwards: any loss can be computed between them."""

V_SHAPED = ("zbv", "dualpipev")
"""Stages go down the ranks and up again: the first rank has the first stage and the last."""

LOOPED = ("looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", *V_SHAPED)
"""Several stages a rank."""

_CLASSES = {
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


class Kind(Enum):
    """What is done with one microbatch in one stage."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUTS = "I"
    """The backward as far as the gradients that go to the stage before."""
    WEIGHTS = "W"
    """What ``INPUTS`` left: the gradients of the stage's own parameters."""


_KINDS = {
    "FORWARD": Kind.FORWARD,
    "FULL_BACKWARD": Kind.BACKWARD,
    "BACKWARD_INPUT": Kind.INPUTS,
    "BACKWARD_WEIGHT": Kind.WEIGHTS,
}
"""Ours by torch's names (``_ComputationType``)."""


@dataclass(frozen=True)
class Action:
    """One thing that a rank does."""

    kind: Kind
    stage: int
    microbatch: int


Orders = Sequence[Sequence[Action]]
"""What each rank does, in order."""


@dataclass(frozen=True)
class StageLayout:
    """``stages`` of a model on ``ranks``."""

    schedule: str
    ranks: int
    stages: int

    def rank_of(self, stage: int) -> int:
        """Where a stage is computed."""
        if self.schedule in V_SHAPED and stage >= self.ranks:
            return self.stages - 1 - stage
        return stage % self.ranks

    def own(self, rank: int) -> list[int]:
        """The stages of a rank, in order."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    @property
    def last_rank(self) -> int:
        """Where the outputs and the loss are."""
        return self.rank_of(self.stages - 1)

    def forwards(self, microbatches: int) -> Orders:
        """All forwards, for a passage without a backward, or with one much later."""
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
        """Forwards and backwards as the schedule mixes them. Raises ``StrategyError`` where it cannot."""
        return _inside(self, microbatches)


def stages_a_rank(schedule: str, ranks: int, balance: Any, marked: int) -> int:
    """Of how many stages a rank has: as many as ``balance`` or ``td.stage`` say, else two where there can be several.

    ``marked``: the stages that modules were built for. Raises ``StrategyError`` for a number that cannot be.
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
    """What one rank sends another, in order: after how many of its actions, and which action needs it."""
    for done, action in enumerate(order, 1):
        needed = _next(layout, action)
        if needed is not None and layout.rank_of(needed.stage) == receiver != layout.rank_of(action.stage):
            yield done, needed


def taken(order: Sequence[Action]) -> Iterator[Action]:
    """By which names messages go to those actions that may need one: a backward in parts needs it first of all."""
    for action in order:
        if action.kind is not Kind.WEIGHTS:
            yield replace(action, kind=Kind.FORWARD if action.kind is Kind.FORWARD else Kind.BACKWARD)


def _next(layout: StageLayout, action: Action) -> Action | None:
    """The action of a neighbouring stage that waits for what this one makes; for a backward in parts its first one."""
    if action.kind is Kind.FORWARD and action.stage + 1 < layout.stages:
        return Action(Kind.FORWARD, action.stage + 1, action.microbatch)
    if action.kind in (Kind.BACKWARD, Kind.INPUTS) and action.stage > 0:
        return Action(Kind.BACKWARD, action.stage - 1, action.microbatch)
    return None


@functools.lru_cache(maxsize=64)
def _inside(layout: StageLayout, microbatches: int) -> Orders:
    if layout.schedule == "1f1b":
        return [_one_forward_one_backward(rank, layout.ranks, microbatches) for rank in range(layout.ranks)]
    from torch.distributed.pipelining import schedules  # takes seconds: torch's tracer comes with it

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
    """Torch's actions as ours; of two that may overlap the first comes first."""
    for action in order:
        if action is None:  # a bubble
            continue
        if together := getattr(action, "sub_actions", None):
            yield from _flat(together)
        else:
            yield Action(_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """As many forwards as there are ranks behind, then one forward and one backward in turn, then what is left."""
    ahead = min(ranks - 1 - rank, microbatches)
    order = [Action(Kind.FORWARD, rank, number) for number in range(ahead)]
    for number in range(microbatches):
        if ahead + number < microbatches:
            order.append(Action(Kind.FORWARD, rank, ahead + number))
        order.append(Action(Kind.BACKWARD, rank, number))
    return order
