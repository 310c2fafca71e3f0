"""The order of work of every schedule: complete, and without two ranks that wait for each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from jupyter_torchdist.protocol.errors import StrategyError
from jupyter_torchdist.protocol.options.strategy import BY_NAME
from jupyter_torchdist.protocol.releases import release_of
from jupyter_torchdist.strategies.pipeline.schedules import (
    LOOPED,
    WHOLE_FORWARD,
    Action,
    Kind,
    Orders,
    StageLayout,
    messages,
    stages_a_rank,
    taken,
)

EACH = [one for one in BY_NAME["schedule"].choices if one != "dualpipev" or release_of(torch.__version__) >= (2, 9)]


def layout(schedule: str, ranks: int) -> StageLayout:
    return StageLayout(schedule, ranks, ranks * stages_a_rank(schedule, ranks, "cost", 0))


def performed(one: StageLayout, orders: Orders) -> set[Action]:
    """What is done when sends never wait and messages between two ranks arrive in the order in which they were sent."""
    ranks = range(one.ranks)
    mail: list[list[Iterator[tuple[int, Action]]]] = [
        [messages(one, orders[src], dst) for src in ranks] for dst in ranks
    ]
    arrived: list[set[Action]] = [set() for _ in ranks]
    place, done = [0] * one.ranks, set[Action]()

    def ready(rank: int, action: Action) -> bool:
        forward = action.kind is Kind.FORWARD
        other = action.stage - 1 if forward else action.stage + 1
        if action.kind is Kind.WEIGHTS or not 0 <= other < one.stages:
            return True
        source = one.rank_of(other)
        wanted = Action(Kind.FORWARD if forward else Kind.BACKWARD, action.stage, action.microbatch)
        if source == rank:
            kinds = [Kind.FORWARD] if forward else [Kind.BACKWARD, Kind.INPUTS]
            return any(Action(kind, other, action.microbatch) in done for kind in kinds)
        sent = {Action(kind, other, action.microbatch) for kind in Kind if (kind is Kind.FORWARD) == forward}
        while wanted not in arrived[rank] and sent & done:
            arrived[rank].add(next(mail[rank][source])[1])
        return wanted in arrived[rank]

    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while place[rank] < len(orders[rank]) and ready(rank, orders[rank][place[rank]]):
                done.add(orders[rank][place[rank]])
                place[rank] += 1
                moved = True
    assert place == [len(order) for order in orders]
    return done


@pytest.mark.parametrize("schedule", EACH)
def test_all_is_done_and_nobody_waits_for_ever(schedule: str) -> None:
    for ranks, count in ((2, 4), (2, 8), (3, 6), (4, 8)):
        one = layout(schedule, ranks)
        forwards = {Action(Kind.FORWARD, stage, number) for stage in range(one.stages) for number in range(count)}
        if schedule in WHOLE_FORWARD:
            assert performed(one, one.forwards(count)) == forwards
            done = forwards | {action for order in one.backwards(count) for action in order}
        else:
            done = performed(one, one.inside(count))
        whole = {(one.stage, one.microbatch) for one in done if one.kind is Kind.BACKWARD}
        halves = [
            {(one.stage, one.microbatch) for one in done if one.kind is kind} for kind in (Kind.INPUTS, Kind.WEIGHTS)
        ]
        assert forwards <= done and halves[0] == halves[1] and not whole & halves[0]
        assert len(whole | halves[0]) == len(forwards)


def test_1f1b_keeps_as_many_microbatches_as_there_are_stages_behind() -> None:
    for rank, order in enumerate(layout("1f1b", 4).inside(8)):
        kept = most = 0
        for action in order:
            kept += 1 if action.kind is Kind.FORWARD else -1
            most = max(most, kept)
        assert most == 4 - rank


@pytest.mark.parametrize("schedule", [one for one in EACH if one not in WHOLE_FORWARD])
def test_a_message_proves_that_its_sender_took_what_it_had_to(schedule: str) -> None:
    """So of many microbatches a rank need keep but few for others."""
    kept = {}
    for count in (8, 32):
        one, kept[count] = layout(schedule, 2), 0
        orders = one.inside(count)
        came = {needed: done for done, needed in messages(one, orders[1], 0)}
        sent, sends, proven = set[Action](), dict(messages(one, orders[0], 1)), 0
        for position, action in enumerate(orders[0], 1):
            for needed in taken([action]):
                done = came.get(needed, 0)
                sent -= set(taken(orders[1][proven:done]))
                proven = max(proven, done)
            if position in sends:
                sent.add(sends[position])
            kept[count] = max(kept[count], len(sent))
        assert 0 < kept[count] < len(sends)
        sent -= set(taken(orders[1]))
        assert not sent  # every message goes to an action, by its name
    assert kept[8] == kept[32]


def test_stages_go_round_or_down_and_up() -> None:
    assert [layout("looped_bfs", 2).rank_of(stage) for stage in range(4)] == [0, 1, 0, 1]
    assert [layout("zbv", 2).rank_of(stage) for stage in range(4)] == [0, 1, 1, 0]
    assert layout("zbv", 2).last_rank == 0
    assert all(layout(schedule, 2).stages == (4 if schedule in LOOPED else 2) for schedule in EACH)


def test_microbatches_that_a_schedule_cannot_take_are_refused() -> None:
    if "dualpipev" in EACH:
        with pytest.raises(StrategyError, match="dualpipev cannot take 2 microbatches on 2 ranks"):
            layout("dualpipev", 2).inside(2)
    with pytest.raises(StrategyError, match="needs 4 stages, there are 6"):
        stages_a_rank("zbv", 2, (1,) * 6, 0)
