"""Decides what a driver does next, from the job's state and the clock. Has no side effects."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from typing import Any

from ..protocol.events import Event
from ..protocol.plan import Plan
from ..protocol.state import RANK_ENDS, JobState, RankState
from ..views.wording import first_few, others, stalled
from . import findings

STOP_GRACE = 1.0
"""Grace in seconds for ranks of other nodes after a rank failed: they only wait for that rank in a collective."""

ENGINE_GRACE = 1.0
"""Seconds beyond the plan's grace that the elastic agent has to end the ranks of its own node."""

_CONSEQUENCES = re.compile(
    r"connection closed by peer|connection reset by peer|broken pipe|read error|socket closed"
    r"|connection was (likely )?closed|ncclremoteerror|recv.*failed|timed out waiting .* for recv"
    r"|process group has been aborted|failed to recv|connectFullMesh failed",
    re.IGNORECASE,
)

JUDGING = 2.0
"""Seconds for the ranks to say where they are, before it is said who holds up the others."""

LONG_WAIT = 5.0
"""Seconds of one wait in a collective after which the ranks are asked where they are; then after twice as many, again
and again."""


@dataclass(frozen=True)
class AttemptStatus:
    """What the driver knows of an attempt beyond its ``JobState``. Times are in seconds on its monotonic clock."""

    interrupts: int = 0
    kill: bool = False
    terminate: bool = False
    """Whether the ranks are to get SIGTERM, with the plan's grace."""
    timed_out: bool = False
    expired: str = ""
    """Why the engine will soon end the job: the agents end their ranks, with the plan's grace."""
    stalled: float | None = None
    """Since when no rank makes progress."""
    judge_at: float = 0.0
    """When the ranks have said where they are, so that it can be said who holds up the others."""
    ended: frozenset[str] = frozenset()
    """Nodes on which no process of the job is alive."""
    lost: frozenset[str] = frozenset()
    taken: str | None = None
    """Why the engine took them, which gives others; empty if it does not say. None: it gives no others."""
    missed: tuple[Event, ...] = ()
    """What agents said of nodes that were lost while no driver was connected."""
    failed_at: float | None = None
    interrupted_at: float | None = None
    signalled: bool = False
    """Whether the ranks were sent SIGINT."""
    end_sent: float | None = None
    """The shortest grace sent to the nodes so far."""
    waits: frozenset[tuple[int, str, int]] = frozenset()
    """Rank, group and number of the collectives in which ranks wait."""
    ask_at: float = float("inf")
    """When the ranks are to be asked where they are."""
    patience: float = LONG_WAIT
    places_wanted: bool = False
    """Whether a client asked where the ranks are."""


@dataclass(frozen=True)
class Interrupt:
    """Send SIGINT to every rank."""


@dataclass(frozen=True)
class AskPlaces:
    """Ranks wait for long, or a client wants to know: ask all where they are."""


@dataclass(frozen=True)
class SayStalled:
    """Write in the journal that no rank makes progress, and who holds up the others."""

    since: float
    """When a rank made progress at last, on the driver's monotonic clock."""
    begun: bool
    """Whether any rank runs user code."""


@dataclass(frozen=True)
class SayResumed:
    """Write in the journal that a rank makes progress again."""


@dataclass(frozen=True)
class End:
    """End the job's processes on every node, with ``grace`` seconds between SIGTERM and SIGKILL."""

    grace: float


@dataclass(frozen=True)
class Stopping:
    """Write in the journal that the job is being stopped, and why."""

    reason: str


@dataclass(frozen=True)
class Finish:
    """No process is alive: the job ends."""

    state: str
    reason: str
    first_failure: int | None
    findings: tuple[dict[str, Any], ...] = ()
    """Why, where it is known."""


@dataclass(frozen=True)
class Again:
    """No process is alive: start all ranks again. ``instead``: the job's end where that is impossible."""

    note: str
    fresh: bool
    restarts: int
    instead: Finish
    without: frozenset[str] = frozenset()
    """Nodes that are lost."""


Action = Interrupt | AskPlaces | SayStalled | SayResumed | End | Stopping | Finish | Again


def decide(plan: Plan, state: JobState, standing: AttemptStatus, now: float) -> list[Action]:
    """The actions to perform now; an empty list means to wait."""
    nodes = {node.name for node in plan.nodes}
    if nodes <= standing.ended | standing.lost:
        return [_again(plan, state, standing) or finish(plan, state, standing)]
    actions: list[Action] = [AskPlaces()] if standing.places_wanted or now >= standing.ask_at else []
    actions += _on_stall(state, standing, now)
    reason = _reason(plan, state, standing)
    if reason and state.state in ("submitted", "starting", "running"):
        actions.append(Stopping(reason))
    grace = _grace(plan, state, standing, now)
    if grace is not None:
        if standing.end_sent is None or grace < standing.end_sent:
            actions.append(End(grace))
    elif (standing.interrupts or standing.timed_out) and not standing.signalled:
        actions.append(Interrupt())
    return actions


def _again(plan: Plan, state: JobState, standing: AttemptStatus) -> Again | None:
    """Another start: in new interpreters if no user code has run, or after a failure if the plan allows it."""
    end = finish(plan, state, standing)
    hung = _ends_stalled(state) and not _begun(state)
    if hung and not plan.fresh and state.attempt == 1 and not _stopped_on_request(standing):
        note = "the forked ranks hung before their first user line; started again with --fresh"
        return Again(note, True, state.restarts, end)
    saved = standing.expired and plan.request and (plan.strategy.checkpoint or plan.strategy.name == "none")
    stopped = _stopped_on_request(standing) or standing.timed_out or (standing.expired and not saved)
    begun = _begun(state) or state.restarts or standing.taken is not None  # what cannot begin needs its user
    if stopped or not begun or state.restarts >= plan.restarts or end.state == "succeeded":
        return None
    number, left = state.restarts + 1, len(plan.nodes) - len(standing.lost)
    which = f"{number} of {plan.restarts}"
    if standing.lost and plan.least_nodes is not None and left >= plan.least_nodes:
        note = f"{end.reason}; all ranks are started again on the other {others(left, 'host')} ({which})"
        return Again(note, plan.fresh, number, end, standing.lost)
    moved = saved or (standing.taken is not None and state.ranks)
    if moved or (not standing.lost and (standing.missed or (end.state == "failed" and state.failures()))):
        note = (
            f"{standing.taken or end.reason}; all ranks are started again{' on other nodes' if moved else ''} ({which})"
        )
        return Again(note, plan.fresh, number, end)
    return None


def _on_stall(state: JobState, standing: AttemptStatus, now: float) -> list[Action]:
    if state.state not in ("starting", "running"):
        return []
    if standing.stalled is None:
        return [SayResumed()] if state.stall is not None else []
    return [SayStalled(standing.stalled, _begun(state))] if state.stall is None and now >= standing.judge_at else []


def _begun(state: JobState) -> bool:
    """Whether user code has begun on any rank."""
    return any(rank.ready for rank in state.ranks.values())


def _ends_stalled(state: JobState) -> bool:
    return state.stall is not None and state.stall.ends


def _reason(plan: Plan, state: JobState, standing: AttemptStatus) -> str:
    if _stopped_on_request(standing):
        return "cancelled"
    if standing.timed_out or standing.expired:
        return "timed_out"
    if failures(state) or _interrupted_unasked(state, standing):
        return "failed"
    if standing.lost or standing.missed or _ends_stalled(state) or _fell_short(plan, state, standing):
        return "failed"
    return ""


def _grace(plan: Plan, state: JobState, standing: AttemptStatus, now: float) -> float | None:
    """The grace in seconds (SIGTERM to SIGKILL) if the job is to end now; None to let it run."""
    if standing.kill or standing.interrupts > 1:
        return 0.0
    if standing.terminate or standing.expired:
        return plan.grace
    if standing.lost or standing.missed:
        return STOP_GRACE
    if _ends_stalled(state):
        return plan.grace if _begun(state) else STOP_GRACE
    if _fell_short(plan, state, standing):  # the other nodes cannot go on without it
        return STOP_GRACE
    if standing.interrupts or standing.timed_out:
        if standing.interrupted_at is not None and now - standing.interrupted_at > plan.grace:
            return 0.0
        # SIGINT interrupts only user code. When no rank runs user code yet, the ranks end at once.
        if not any(rank.state == "running" for rank in state.ranks.values()):
            return STOP_GRACE if not _all_ended(plan, state) else None
        return None
    if standing.failed_at is not None:
        if now - standing.failed_at > plan.grace + ENGINE_GRACE:
            return STOP_GRACE
        # On the node of the failed rank, the elastic agent ends the other ranks once that rank has exited.
        if len(plan.nodes) > 1 and any(rank.code is not None for rank in failures(state)):
            return STOP_GRACE
    return None


def _stopped_on_request(standing: AttemptStatus) -> bool:
    return bool(standing.interrupts or standing.kill or standing.terminate)


def _interrupted_unasked(state: JobState, standing: AttemptStatus) -> bool:
    """Whether a rank got a SIGINT from elsewhere: it has ended its code, and others may wait for it in a collective."""
    asked = _stopped_on_request(standing) or standing.timed_out or bool(standing.expired)
    return not asked and any(rank.state == "interrupted" for rank in state.ranks.values())


def _fell_short(plan: Plan, state: JobState, standing: AttemptStatus) -> bool:
    """Whether a node has ended although not all its ranks are done. It may never have been told to start."""
    ranks = (rank for node in plan.nodes if node.name in standing.ended for rank in node.ranks)
    return any(rank not in state.ranks or state.ranks[rank].state != "done" for rank in ranks)


def _all_ended(plan: Plan, state: JobState) -> bool:
    return len(state.ranks) == plan.world_size and all(rank.state in RANK_ENDS for rank in state.ranks.values())


def all_ready(plan: Plan, state: JobState) -> bool:
    """Whether user code has begun on every rank."""
    ranks = state.ranks.values()
    return len(ranks) == plan.world_size and all(rank.ready or rank.state == "done" for rank in ranks)


def failures(state: JobState) -> list[RankState]:
    """Failed ranks: causes before consequences, each group sorted by time.

    A rank whose peer died fails too, with a broken connection, and may report its failure first.
    """
    return sorted(state.failures(), key=follows)


def follows(rank: RankState) -> bool:
    """Whether the rank failed because another one was gone."""
    return bool(rank.error and _CONSEQUENCES.search(rank.error.message))


def finish(plan: Plan, state: JobState, standing: AttemptStatus) -> Finish:
    """The final state of an attempt, when no process of it is alive."""
    failed = failures(state)
    done = [rank for rank in state.ranks.values() if rank.state == "done"]
    if len(done) == plan.world_size:
        return _with_results(plan, standing)
    # A failure before the request to stop has priority: the user must see it.
    failed_first = bool(failed) and state.state == "stopping" and state.reason == "failed"
    if _stopped_on_request(standing) and not failed_first:
        killed = standing.kill or standing.interrupts > 1
        return Finish("cancelled", "killed on request" if killed else "stopped on request", None)
    if standing.expired and not failed_first and not standing.lost:  # else the lost node is why the engine ends all
        return Finish("timed_out", standing.expired, None)
    if standing.timed_out and not failed_first:
        return Finish("timed_out", f"ran longer than --timeout {plan.timeout:g}s", None)
    if standing.missed and all(map(follows, failed)):
        return _missed(plan, standing)
    if standing.lost:
        gone = ", ".join(node.called for node in plan.nodes if node.name in standing.lost)
        return Finish("lost", f"host {gone} is gone", failed[0].rank if failed else None)
    if failed:
        return Finish("failed", failure_in_words(failed[0]), failed[0].rank)
    if state.stall is not None and state.stall.ends:
        return Finish("failed", stalled(state.stall, state.stall.told), None)
    if state.ranks and (absent := [node.called for node in plan.nodes if not state.ranks.keys() & set(node.ranks)]):
        return Finish("failed", f"no rank of {', '.join(absent)} could be started, so the other ranks were ended", None)
    if state.ranks and (missing := sorted(set(range(plan.world_size)) - state.ranks.keys())):
        which = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
        return Finish("failed", f"{which} could not be started, so the other ranks were ended", None)
    hit = [rank for rank in state.ranks.values() if rank.state == "interrupted" and not _lost_its_launcher(rank)]
    if hit:
        ranks = ", ".join(str(rank.rank) for rank in sorted(hit, key=lambda rank: rank.rank))
        return Finish("failed", f"rank {ranks} got a SIGINT that did not come from this notebook", None)
    if any(_lost_its_launcher(rank) for rank in state.ranks.values()):
        return Finish("failed", "the launcher of the ranks was killed, and the ranks were ended", None)
    if not state.ranks:
        return Finish("failed", "the ranks could not be started; see the launcher's log", None)
    return Finish("lost", "the ranks are gone and left no result", None)


def _missed(plan: Plan, standing: AttemptStatus) -> Finish:
    """A node was lost while no driver was connected. What the first node's agent said of it counts most."""
    called = {node.name: node.called for node in plan.nodes}
    event = min(standing.missed, key=lambda event: event.node or "")
    gone = [called.get(name, name) for name in event.data["nodes"]]
    by = called.get(event.node or "", "another host")
    causes = tuple(findings.of_missed(host, by, event.data["seconds"]) for host in gone)
    verb = "was" if len(gone) == 1 else "were"
    return Finish("failed", f"{first_few(gone)} {verb} lost while no driver was connected", None, causes)


def _with_results(plan: Plan, standing: AttemptStatus) -> Finish:
    """All ranks are done. The job has succeeded if every node whose results are wanted has sent them."""
    wanted = plan.nodes if plan.collect == "all" else plan.nodes[:1]
    if without := [node.called for node in wanted if node.name in standing.lost]:
        return Finish("lost", f"all ranks were done, but host {', '.join(without)} is gone with their results", None)
    return Finish("succeeded", "", None)


def _lost_its_launcher(rank: RankState) -> bool:
    """Whether the rank's launcher died. Torch then interrupts the rank, and nobody sees the rank's exit code."""
    return rank.state == "stopped" or (rank.state == "interrupted" and rank.code == -signal.SIGKILL)


def failure_in_words(rank: RankState) -> str:
    """``rank 3 on node2: ValueError: …`` or ``rank 3 on node2 was killed (SIGKILL)``."""
    where = f"rank {rank.rank} on {rank.host or rank.node or 'an unknown host'}"
    return f"{where}: {rank.error.title}" if rank.error else f"{where} {rank.why or 'is gone'}"


def resumed(state: JobState) -> AttemptStatus:
    """The status with which a driver takes up a job. The journal holds the requests to the earlier driver."""
    stopping = state.reason if state.state == "stopping" else ""
    return AttemptStatus(interrupts=int(stopping == "cancelled"), timed_out=stopping == "timed_out")


def asked(standing: AttemptStatus, request: str) -> AttemptStatus:
    """``standing`` with a request of a client: ``interrupt``, ``terminate``, ``kill`` or ``stacks``."""
    if request == "interrupt":
        return replace(standing, interrupts=standing.interrupts + 1)
    if request == "stacks":
        return replace(standing, places_wanted=True)
    return replace(
        standing, terminate=standing.terminate or request == "terminate", kill=standing.kill or request == "kill"
    )


def told(standing: AttemptStatus, event: Event) -> AttemptStatus:
    """``standing`` after an event of a node."""
    if event.kind == "node.missed":
        return replace(standing, missed=(*standing.missed, event))
    return replace(standing, expired=event.data["reason"]) if event.kind == "node.expiring" else standing


def noted(standing: AttemptStatus, state: JobState, now: float, stalled: float | None = None) -> AttemptStatus:
    """``standing`` with the time of the first failure, of the interrupt and of the next question to ranks that wait.

    ``stalled``: since when no rank makes progress. Then the ranks are asked where they are, too.
    """
    if stalled is not None and standing.stalled is None and state.stall is None:
        standing = replace(standing, judge_at=now + JUDGING, places_wanted=True)
    standing = replace(standing, stalled=stalled)
    if standing.failed_at is None and (state.failures() or _interrupted_unasked(state, standing)):
        standing = replace(standing, failed_at=now)
    if standing.interrupted_at is None and (standing.interrupts or standing.timed_out):
        standing = replace(standing, interrupted_at=now)
    waits = frozenset(
        (rank.rank, waiting.group, waiting.number) for rank in state.ranks.values() if (waiting := rank.waits_in)
    )
    if waits and not waits & standing.waits:
        return replace(standing, waits=waits, ask_at=now + LONG_WAIT, patience=LONG_WAIT)
    return replace(standing, waits=waits, ask_at=standing.ask_at if waits else float("inf"))


def after_asking(standing: AttemptStatus, now: float) -> AttemptStatus:
    """``standing`` after ``AskPlaces``."""
    standing = replace(standing, places_wanted=False)
    if now < standing.ask_at:
        return standing
    return replace(standing, ask_at=now + standing.patience, patience=2 * standing.patience)
