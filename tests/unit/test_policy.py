"""The driver's decisions: which state and standing lead to which action, and how a job is said to have ended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jupyter_torchdist.driver import policy
from jupyter_torchdist.driver.policy import (
    Again,
    AttemptStatus,
    End,
    Finish,
    Interrupt,
    SayResumed,
    SayStalled,
    Stopping,
    decide,
    finish,
)
from jupyter_torchdist.protocol.events import ErrorRecord, Event, Finding
from jupyter_torchdist.protocol.plan import NodePlan, Plan
from jupyter_torchdist.protocol.state import JobState, RankState, Stall, Waiting
from jupyter_torchdist.protocol.strategy import StrategyPlan

GRACE = 5.0
NOW = 100.0
STOP = policy.STOP_GRACE

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:43210"


def plan(nodes: int = 1, **changes: Any) -> Plan:
    parts = tuple(NodePlan(f"node{n}", (2 * n, 2 * n + 1)) for n in range(nodes))
    base = Plan("j", 2 * nodes, "gloo", parts, fresh=False, numa_binding=None, timeout=None, grace=GRACE)
    return replace(base, **changes)


def rank(number: int, state: str, **changes: Any) -> RankState:
    changes = {"ready": 0.0 if state == "starting" else 1.0, **changes}
    return RankState(number, node=f"node{number // 2}", host=f"host{number // 2}", state=state, **changes)


def raised(number: int, message: str, t: float, kind: str = "ValueError", **changes: Any) -> RankState:
    return rank(number, "failed", error=ErrorRecord(kind, "builtins", message, "", t=t), ended=t, **changes)


def killed(number: int, t: float) -> RankState:
    return rank(number, "killed", code=-9, why="was killed (SIGKILL)", ended=t)


def job(*ranks: RankState, state: str = "running", **changes: Any) -> JobState:
    return JobState("j", state=state, world_size=2, attempt=1, ranks={rank.rank: rank for rank in ranks}, **changes)


RUNNING = job(rank(0, "running"), rank(1, "running"))
STARTING = job(rank(0, "starting"), state="starting")
DONE = job(rank(0, "done"), rank(1, "done"))
FAILED = job(raised(0, "boom", 1.0), rank(1, "running"))
FINDING = Finding("rank-stuck", "warning", 1, None, "rank 1 has not entered all_reduce #3", "a cause", "a remedy", ())
HUNG = replace(STARTING, stall=Stall(1000.0, 1034.0, FINDING, ends=True))
KILLED = replace(RUNNING, stall=HUNG.stall)
STALLED = replace(RUNNING, stall=replace(KILLED.stall, ends=False))  # type: ignore[type-var]
WORDS = "stalled 34.0 s: rank 1 has not entered all_reduce #3"
STOPPING = replace(RUNNING, state="stopping", reason="cancelled")

AGAIN = Again(
    "the forked ranks hung before their first user line; started again with --fresh",
    True,
    0,
    Finish("failed", WORDS, None),
)

TRANSITIONS: dict[str, tuple[JobState, AttemptStatus, list[policy.Action]]] = {
    "all is well: wait": (RUNNING, AttemptStatus(), []),
    "nothing has begun: wait": (JobState("j"), AttemptStatus(), []),
    "a rank that somebody else interrupted fails the job": (
        job(rank(0, "interrupted"), rank(1, "running")),
        AttemptStatus(failed_at=NOW),
        [Stopping("failed")],
    ),
    "those that wait for it are ended after the grace": (
        job(rank(0, "interrupted"), rank(1, "running"), state="stopping", reason="failed"),
        AttemptStatus(failed_at=NOW - GRACE - policy.ENGINE_GRACE - 0.1),
        [End(STOP)],
    ),
    # -- an interrupt
    "an interrupt is said and sent": (
        RUNNING,
        AttemptStatus(interrupts=1, interrupted_at=NOW),
        [Stopping("cancelled"), Interrupt()],
    ),
    "an interrupt is said once": (STOPPING, AttemptStatus(interrupts=1, interrupted_at=NOW), [Interrupt()]),
    "an interrupt is sent once": (STOPPING, AttemptStatus(interrupts=1, interrupted_at=NOW, signalled=True), []),
    "ranks that do not hear an interrupt are killed after the grace": (
        STOPPING,
        AttemptStatus(interrupts=1, interrupted_at=NOW - GRACE - 0.1, signalled=True),
        [End(0.0)],
    ),
    "ranks that were interrupted and do not leave are killed after the grace": (
        job(rank(0, "interrupted"), rank(1, "interrupted"), state="stopping", reason="cancelled"),
        AttemptStatus(interrupts=1, interrupted_at=NOW - GRACE - 0.1, signalled=True),
        [End(0.0)],
    ),
    "ranks that were interrupted may take the grace to leave": (
        job(rank(0, "interrupted"), rank(1, "interrupted"), state="stopping", reason="cancelled"),
        AttemptStatus(interrupts=1, interrupted_at=NOW - GRACE + 0.1, signalled=True),
        [],
    ),
    "an interrupt before user code runs ends the ranks": (
        STARTING,
        AttemptStatus(interrupts=1, interrupted_at=NOW),
        [Stopping("cancelled"), End(STOP)],
    ),
    "an interrupt before there is a rank ends the launcher": (
        JobState("j", state="starting", attempt=1),
        AttemptStatus(interrupts=1, interrupted_at=NOW),
        [Stopping("cancelled"), End(STOP)],
    ),
    "a second interrupt kills at once": (
        STOPPING,
        AttemptStatus(interrupts=2, interrupted_at=NOW, signalled=True),
        [End(0.0)],
    ),
    "a client that was told to end ends the ranks with their grace": (
        RUNNING,
        AttemptStatus(terminate=True),
        [Stopping("cancelled"), End(GRACE)],
    ),
    "that is sent once": (STOPPING, AttemptStatus(terminate=True, end_sent=GRACE), []),
    "a second signal kills at once": (STOPPING, AttemptStatus(terminate=True, kill=True, end_sent=GRACE), [End(0.0)]),
    "a kill kills at once": (RUNNING, AttemptStatus(kill=True), [Stopping("cancelled"), End(0.0)]),
    "a kill is sent once": (STOPPING, AttemptStatus(kill=True, end_sent=0.0), []),
    "a kill shortens an end that is under way": (STOPPING, AttemptStatus(kill=True, end_sent=STOP), [End(0.0)]),
    # -- a timeout
    "a timeout interrupts": (
        RUNNING,
        AttemptStatus(timed_out=True, interrupted_at=NOW),
        [Stopping("timed_out"), Interrupt()],
    ),
    "a timeout kills after the grace": (
        replace(RUNNING, state="stopping", reason="timed_out"),
        AttemptStatus(timed_out=True, interrupted_at=NOW - GRACE - 0.1, signalled=True),
        [End(0.0)],
    ),
    # -- a failure
    "a failure is said; the engine ends its own node": (FAILED, AttemptStatus(failed_at=NOW), [Stopping("failed")]),
    "a failure that the engine does not end is ended": (
        replace(FAILED, state="stopping", reason="failed"),
        AttemptStatus(failed_at=NOW - GRACE - policy.ENGINE_GRACE - 0.1),
        [End(STOP)],
    ),
    "an interrupt after a failure is sent as well": (
        replace(FAILED, state="stopping", reason="failed"),
        AttemptStatus(failed_at=NOW, interrupts=1, interrupted_at=NOW),
        [Interrupt()],
    ),
    # -- a stall
    "that nothing goes on is said when the ranks have answered": (
        RUNNING,
        AttemptStatus(stalled=NOW - 34, judge_at=NOW),
        [SayStalled(NOW - 34, begun=True)],
    ),
    "…not before": (RUNNING, AttemptStatus(stalled=NOW - 34, judge_at=NOW + 1), []),
    "…and once": (STALLED, AttemptStatus(stalled=NOW - 34), []),
    "that it goes on again": (STALLED, AttemptStatus(), [SayResumed()]),
    "…nothing is said while it is ended": (replace(STALLED, state="stopping"), AttemptStatus(end_sent=GRACE), []),
    "a stalled job is ended where that was asked for": (
        KILLED,
        AttemptStatus(stalled=NOW - 34),
        [Stopping("failed"), End(GRACE)],
    ),
    "…and its reason is who held up the others, whatever SIGTERM led to": (
        replace(KILLED, ranks={0: raised(0, "worker was killed", 5.0), 1: rank(1, "stopped")}, state="stopping"),
        AttemptStatus(ended=frozenset({"node0"})),
        [Finish("failed", WORDS, None)],
    ),
    "ranks that hang before their first line are ended": (
        HUNG,
        AttemptStatus(stalled=NOW - 34),
        [Stopping("failed"), End(STOP)],
    ),
    "…and started again": (HUNG, AttemptStatus(ended=frozenset({"node0"})), [AGAIN]),
    "…but once": (
        replace(HUNG, attempt=2),
        AttemptStatus(ended=frozenset({"node0"})),
        [Finish("failed", WORDS, None)],
    ),
    "…and not after an interrupt": (
        replace(HUNG, state="stopping"),
        AttemptStatus(interrupts=1, ended=frozenset({"node0"})),
        [Finish("cancelled", "stopped on request", None)],
    ),
    # -- the end
    "nothing is alive: the end": (DONE, AttemptStatus(ended=frozenset({"node0"})), [Finish("succeeded", "", None)]),
    "a lost node is an end too": (
        RUNNING,
        AttemptStatus(lost=frozenset({"node0"})),
        [Finish("lost", "host node0 is gone", None)],
    ),
}


@pytest.mark.parametrize("case", TRANSITIONS)
def test_one_node(case: str) -> None:
    state, standing, expected = TRANSITIONS[case]
    assert decide(plan(), state, standing, NOW) == expected


TWO = replace(RUNNING, world_size=4, ranks={number: rank(number, "running") for number in range(4)})
TWO_FAILED = replace(TWO, ranks={**TWO.ranks, 3: raised(3, "boom", 1.0)})
TWO_OUT = replace(TWO, ranks={**TWO.ranks, 3: raised(3, "boom", 1.0, code=1)})
HALF_DONE = replace(TWO, ranks={**TWO.ranks, 0: rank(0, "done"), 1: rank(1, "done")})
NODE0 = frozenset({"node0"})

TWO_NODES: dict[str, tuple[JobState, AttemptStatus, list[policy.Action]]] = {
    "a failing rank is given the time to report": (TWO_FAILED, AttemptStatus(failed_at=NOW), [Stopping("failed")]),
    "once it is out, the other node is ended": (TWO_OUT, AttemptStatus(failed_at=NOW), [Stopping("failed"), End(STOP)]),
    "a node that has succeeded leaves the other alone": (HALF_DONE, AttemptStatus(ended=NODE0), []),
    "a node that has ended with a failure ends the other": (
        TWO_OUT,
        AttemptStatus(ended=NODE0, failed_at=NOW),
        [Stopping("failed"), End(STOP)],
    ),
    "a node that has ended without having begun ends the other": (
        replace(TWO, ranks={2: rank(2, "starting"), 3: rank(3, "starting")}),
        AttemptStatus(ended=NODE0),
        [Stopping("failed"), End(STOP)],
    ),
    "a node that ended after an interrupt ends the other": (
        replace(TWO, state="stopping", reason="cancelled"),
        AttemptStatus(ended=NODE0, interrupts=1, interrupted_at=NOW, signalled=True),
        [End(STOP)],
    ),
    "a lost node ends the other": (TWO, AttemptStatus(lost=NODE0), [Stopping("failed"), End(STOP)]),
    "…which is told once": (
        replace(TWO, state="stopping", reason="failed"),
        AttemptStatus(lost=NODE0, end_sent=STOP),
        [],
    ),
    "one ended, one lost: the end": (
        TWO,
        AttemptStatus(lost=NODE0, ended=frozenset({"node1"})),
        [Finish("lost", "host node0 is gone", None)],
    ),
}


@pytest.mark.parametrize("case", TWO_NODES)
def test_two_nodes(case: str) -> None:
    state, standing, expected = TWO_NODES[case]
    assert decide(plan(nodes=2), state, standing, NOW) == expected


def test_no_second_start_of_a_fresh_job() -> None:
    (end,) = decide(plan(fresh=True), HUNG, AttemptStatus(ended=NODE0), NOW)
    assert isinstance(end, Finish)
    assert end.state == "failed"


def test_a_failure_is_followed_by_another_start_while_the_plan_allows_it() -> None:
    failed = job(raised(1, "boom", 1.0), rank(0, "stopped"), state="stopping", reason="failed", restarts=1)
    ended = AttemptStatus(ended=NODE0)
    boom = Finish("failed", "rank 1 on host0: ValueError: boom", 1)
    again = Again(f"{boom.reason}; all ranks are started again (2 of 2)", False, 2, boom)
    assert decide(plan(restarts=2), failed, ended, NOW) == [again]
    assert decide(plan(restarts=1), failed, ended, NOW) == [boom]
    assert decide(plan(restarts=2), failed, replace(ended, interrupts=1), NOW) == [boom]
    assert decide(plan(restarts=2), failed, replace(ended, timed_out=True), NOW) == [boom]
    assert decide(plan(restarts=2), DONE, ended, NOW) == [Finish("succeeded", "", None)]
    (lost,) = decide(plan(restarts=2), failed, AttemptStatus(lost=NODE0), NOW)
    assert isinstance(lost, Finish)


def test_ranks_that_never_began_are_not_started_again() -> None:
    """Whatever kept them from it needs its user. After an attempt that had begun they are."""
    failed = job(raised(1, "boom", 1.0, ready=0.0), rank(0, "stopped", ready=0.0))
    gone = AttemptStatus(lost=NODE0, ended=frozenset({"node1", "node2"}))
    for state, number, standing, options in (
        (failed, 1, AttemptStatus(ended=NODE0), {}),
        (STARTING, 3, gone, {"least_nodes": 2}),
    ):
        assert isinstance(decide(plan(number, restarts=2, **options), state, standing, NOW)[0], Finish)
        later = replace(state, restarts=1)
        assert isinstance(decide(plan(number, restarts=2, **options), later, standing, NOW)[0], Again)


def test_a_lost_host_is_followed_by_a_start_on_the_others_where_these_are_enough() -> None:
    gone = AttemptStatus(lost=NODE0, ended=frozenset({"node1", "node2"}))
    end = Finish("lost", "host node0 is gone", None)
    words = f"{end.reason}; all ranks are started again on the other 2 hosts (1 of 3)"
    assert decide(plan(3, restarts=3, least_nodes=2), TWO, gone, NOW) == [Again(words, False, 1, end, NODE0)]
    assert decide(plan(3, restarts=3, least_nodes=3), TWO, gone, NOW) == [end]
    assert decide(plan(3, restarts=3), TWO, gone, NOW) == [end]
    assert decide(plan(3, restarts=3, least_nodes=2), replace(TWO, restarts=3), gone, NOW) == [end]
    assert decide(plan(3, restarts=3, least_nodes=2), TWO, replace(gone, kill=True), NOW) == [
        Finish("cancelled", "killed on request", None)
    ]


def test_an_engine_gives_other_nodes_for_those_that_it_took() -> None:
    gone = AttemptStatus(lost=NODE0, ended=frozenset({"node1", "node2"}), taken="PREEMPTED")
    end = Finish("lost", "host node0 is gone", None)
    again = Again("PREEMPTED; all ranks are started again on other nodes (1 of 3)", False, 1, end)
    assert decide(plan(3, restarts=3), TWO, gone, NOW) == [again]
    silent = replace(again, note=again.note.replace("PREEMPTED", end.reason))
    assert decide(plan(3, restarts=3), TWO, replace(gone, taken=""), NOW) == [silent]
    assert decide(plan(3), TWO, gone, NOW) == [end]
    assert decide(plan(3, restarts=3), TWO, replace(gone, interrupts=1), NOW) != [again]
    assert decide(plan(3, restarts=3), JobState("j"), gone, NOW) == [end]  # not one rank has run


def test_at_the_engines_time_limit_only_what_was_saved_goes_on() -> None:
    over = AttemptStatus(ended=NODE0, expired="the limit")
    end = Finish("timed_out", "the limit", None)
    again = Again("the limit; all ranks are started again on other nodes (1 of 1)", False, 1, end)
    mine, ddp = StrategyPlan(), StrategyPlan("ddp")
    asked = plan(restarts=1, request="#!/bin/sh")
    assert decide(replace(asked, strategy=mine), RUNNING, over, NOW) == [again]
    assert decide(replace(asked, strategy=replace(ddp, checkpoint="c")), RUNNING, over, NOW) == [again]
    assert decide(replace(asked, strategy=ddp), RUNNING, over, NOW) == [end]
    assert decide(plan(restarts=1), RUNNING, over, NOW) == [end]
    assert decide(replace(asked, restarts=0), RUNNING, over, NOW) == [end]


ENDS: dict[str, tuple[JobState, AttemptStatus, tuple[str, str, int | None]]] = {
    "all done": (DONE, AttemptStatus(), ("succeeded", "", None)),
    "all done although somebody pressed ■": (DONE, AttemptStatus(interrupts=1), ("succeeded", "", None)),
    "cancelled": (
        job(rank(0, "interrupted"), rank(1, "stopped")),
        AttemptStatus(interrupts=1),
        ("cancelled", "stopped on request", None),
    ),
    "terminated on request": (RUNNING, AttemptStatus(terminate=True), ("cancelled", "stopped on request", None)),
    "a rank that somebody else interrupted, and one that was ended for it": (
        job(rank(0, "interrupted", code=-15), rank(1, "stopped", code=-15)),
        AttemptStatus(ended=NODE0, failed_at=NOW, end_sent=STOP),
        ("failed", "rank 0 got a SIGINT that did not come from this notebook", None),
    ),
    "killed on request": (RUNNING, AttemptStatus(kill=True), ("cancelled", "killed on request", None)),
    "interrupted twice": (RUNNING, AttemptStatus(interrupts=2), ("cancelled", "killed on request", None)),
    "what a cancel breaks is no failure": (
        job(rank(0, "interrupted"), raised(1, GLOO, 2.0), state="stopping", reason="cancelled"),
        AttemptStatus(interrupts=1),
        ("cancelled", "stopped on request", None),
    ),
    "a cancel after a failure hides nothing": (
        job(raised(0, "boom", 1.0), rank(1, "interrupted"), state="stopping", reason="failed"),
        AttemptStatus(interrupts=1),
        ("failed", "rank 0 on host0: ValueError: boom", 0),
    ),
    "timed out": (
        job(rank(0, "interrupted"), rank(1, "killed")),
        AttemptStatus(timed_out=True),
        ("timed_out", "ran longer than --timeout 90s", None),
    ),
    "raised": (FAILED, AttemptStatus(), ("failed", "rank 0 on host0: ValueError: boom", 0)),
    "killed": (
        job(rank(0, "stopped"), killed(1, 3.0)),
        AttemptStatus(),
        ("failed", "rank 1 on host0 was killed (SIGKILL)", 1),
    ),
    "an exit code": (
        job(rank(0, "failed", code=3, why="ended with exit code 3"), rank(1, "stopped")),
        AttemptStatus(),
        ("failed", "rank 0 on host0 ended with exit code 3", 0),
    ),
    "the launcher was killed": (
        job(rank(0, "stopped"), rank(1, "stopped")),
        AttemptStatus(),
        ("failed", "the launcher of the ranks was killed, and the ranks were ended", None),
    ),
    "nothing ever began": (
        JobState("j", state="starting"),
        AttemptStatus(),
        ("failed", "the ranks could not be started; see the launcher's log", None),
    ),
    "no outcome": (RUNNING, AttemptStatus(), ("lost", "the ranks are gone and left no result", None)),
    "a lost node is named with the failure": (
        FAILED,
        AttemptStatus(lost=frozenset({"node1", "node0"})),
        ("lost", "host node0 is gone", 0),
    ),
}


def test_a_node_that_never_began_is_named() -> None:
    state = replace(TWO, ranks={2: rank(2, "stopped"), 3: rank(3, "stopped")})
    assert finish(plan(2), state, AttemptStatus()) == Finish(
        "failed", "no rank of node0 could be started, so the other ranks were ended", None
    )


@pytest.mark.parametrize("case", ENDS)
def test_how_a_job_ended(case: str) -> None:
    state, standing, expected = ENDS[case]
    assert finish(plan(timeout=90.0), state, standing) == Finish(*expected)


@pytest.mark.parametrize(
    "message",
    [
        GLOO,
        "Connection reset by peer",
        "[Rank 1] NCCL: ncclRemoteError: A call failed possibly due to a network error",
        "Socket closed",
        "connectFullMesh failed with error",
    ],
)
def test_a_killed_rank_is_blamed_although_its_peer_spoke_first(message: str) -> None:
    state = job(raised(0, message, 1.0, "RuntimeError"), killed(1, 1.2))
    assert [failed.rank for failed in policy.failures(state)] == [1, 0]
    assert finish(plan(), state, AttemptStatus()).first_failure == 1


def test_of_two_causes_the_earlier_is_blamed() -> None:
    state = job(raised(0, "late", 2.0), raised(1, "early", 1.0))
    assert finish(plan(), state, AttemptStatus()) == Finish("failed", "rank 1 on host0: ValueError: early", 1)


def test_of_consequences_alone_the_earlier_is_blamed() -> None:
    state = job(raised(0, GLOO, 2.0), raised(1, GLOO, 1.0))
    assert finish(plan(), state, AttemptStatus()).first_failure == 1


def test_noted_keeps_the_first_time() -> None:
    failed = policy.noted(AttemptStatus(), FAILED, 1.0)
    assert failed.failed_at == 1.0
    assert policy.noted(failed, FAILED, 2.0).failed_at == 1.0
    interrupted = policy.noted(AttemptStatus(interrupts=1), RUNNING, 1.0)
    assert (interrupted.interrupted_at, interrupted.failed_at) == (1.0, None)
    alone = job(rank(0, "interrupted"), rank(1, "running"))
    assert policy.noted(AttemptStatus(), alone, 1.0).failed_at == 1.0
    assert policy.noted(interrupted, alone, 2.0).failed_at is None
    assert policy.noted(replace(interrupted, interrupts=2), RUNNING, 2.0).interrupted_at == 1.0


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (RUNNING, AttemptStatus()),
        (replace(RUNNING, state="stopping", reason="cancelled"), AttemptStatus(interrupts=1)),
        (replace(RUNNING, state="stopping", reason="timed_out"), AttemptStatus(timed_out=True)),
        (replace(FAILED, state="stopping", reason="failed"), AttemptStatus()),
    ],
)
def test_a_driver_that_takes_over_knows_what_its_predecessor_was_told(state: JobState, expected: AttemptStatus) -> None:
    assert policy.resumed(state) == expected


def test_ranks_that_wait_for_long_are_asked_where_they_are() -> None:
    """Once a wait has lasted five seconds, then after ten, twenty, …; a new wait begins anew."""

    def waiting(number: int) -> JobState:
        return job(rank(0, "running", waiting=Waiting("all_reduce", "gloo:0", number, 0.0)), rank(1, "running"))

    standing = policy.noted(AttemptStatus(), waiting(1), NOW)
    for after, begins in ((5.0, NOW), (5.0, NOW + 5), (10.0, NOW + 10), (20.0, NOW + 20)):
        standing = policy.noted(standing, waiting(1), begins + after - 0.1)
        assert decide(plan(), waiting(1), standing, begins + after - 0.1) == []
        assert decide(plan(), waiting(1), standing, begins + after) == [policy.AskPlaces()]
        standing = policy.after_asking(standing, begins + after)
    standing = policy.noted(standing, waiting(2), NOW + 50)
    assert standing.ask_at == NOW + 55
    standing = policy.noted(standing, RUNNING, NOW + 51)
    assert decide(plan(), RUNNING, standing, NOW + 500) == []


def missed(by: str, *nodes: str) -> Event:
    return Event("node.missed", 1.0, node=by, data={"nodes": list(nodes), "seconds": 15.0})


def test_a_node_that_was_missed_while_no_driver_was_connected_ends_all() -> None:
    standing = policy.told(AttemptStatus(), missed("node0", "node1"))
    assert decide(plan(2), RUNNING, standing, NOW) == [Stopping("failed"), End(STOP)]
    gone = replace(standing, ended=frozenset({"node0"}), lost=frozenset({"node1"}))
    [end] = decide(plan(2, restarts=3), RUNNING, gone, NOW)
    assert isinstance(end, Finish)
    assert (end.state, end.reason) == ("failed", "node1 was lost while no driver was connected")
    [finding] = end.findings
    assert finding["sentence"] == "node0 heard nothing of node1 for 15 s, so the ranks were ended."
    assert "--hosts node1" in finding["remedy"]
    [again] = decide(plan(2, restarts=3, least_nodes=1), RUNNING, gone, NOW)
    assert again == Again(
        f"{end.reason}; all ranks are started again on the other host (1 of 3)", False, 1, end, frozenset({"node1"})
    )
    back = replace(gone, ended=frozenset({"node0", "node1"}), lost=frozenset())
    [again] = decide(plan(2, restarts=3), RUNNING, back, NOW)
    assert isinstance(again, Again)
    assert not again.without


def test_what_the_first_node_says_of_a_partition_counts() -> None:
    standing = AttemptStatus()
    for event in (missed("node1", "node0"), missed("node0", "node1", "node2")):
        standing = policy.told(standing, event)
    end = finish(plan(3), RUNNING, standing)
    assert end.reason == "node1, node2 were lost while no driver was connected"


def test_an_exception_before_a_node_was_missed_is_the_cause() -> None:
    standing = policy.told(AttemptStatus(), missed("node0", "node1"))
    broken = raised(1, GLOO, 1.0, "RuntimeError")
    assert finish(plan(2), job(broken, rank(0, "stopped")), standing).reason.startswith("node1 was lost")
    assert finish(plan(2), job(broken, raised(0, "boom", 2.0)), standing).reason == "rank 0 on host0: ValueError: boom"


def test_a_lost_node_is_why_the_engine_ends_the_others() -> None:
    two = job(*(rank(number, "killed") for number in range(4)))
    expired = AttemptStatus(expired="the engine ends it", ended=frozenset({"node0"}))
    assert finish(plan(2), two, replace(expired, ended=frozenset({"node0", "node1"}))).state == "timed_out"
    assert finish(plan(2), two, replace(expired, lost=frozenset({"node1"}))).state == "lost"
