"""A job's state: a fold over its events, with the same result in every reader."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from .events import FINAL_STATES, ErrorRecord, Event, Finding
from .typed import Record

PROVING = "proving the first steps"
RANK_ENDS = ("done", "failed", "interrupted", "killed", "stopped", "lost")


@dataclass(frozen=True)
class Waiting(Record):
    """The collective in which a rank waits: the ``number``-th of its ``group``."""

    operation: str
    """For example ``all_reduce``."""
    group: str
    """Backend and name, the same on every rank: ``gloo:0``."""
    number: int
    since: float
    size: int = 0
    """Bytes of this rank's input; 0 if unknown."""
    members: tuple[int, ...] | None = None
    """The ranks of the group; null: all ranks of the job; empty: unknown."""

    @property
    def call(self) -> tuple[str, int]:
        """What must be equal on all ranks: the operation, and its size where that does not depend on the rank."""
        return self.operation, self.size if self.operation in ("all_reduce", "broadcast", "allreduce") else 0


@dataclass(frozen=True)
class Stall(Record):
    """No rank makes progress."""

    since: float
    """When a rank made progress at last, in seconds since the epoch."""
    told: float
    """When this was noticed."""
    finding: Finding
    ends: bool
    """Whether the job is ended because of it."""


@dataclass(frozen=True)
class RankState:
    """One rank. Times in seconds since the epoch, on its node's clock."""

    rank: int
    node: str = ""
    host: str = ""
    pid: int = 0
    state: str = "starting"
    """starting, running, or one of ``RANK_ENDS``; ``stopped``: because another rank failed or the job was ended."""
    started: float = 0.0
    ready: float = 0.0
    ended: float = 0.0
    error: ErrorRecord | None = None
    code: int | None = None
    why: str = ""
    """How the rank's process ended, if that needs an explanation: ``was killed (SIGKILL)``."""
    results: tuple[str, ...] = ()
    left: tuple[tuple[str, str], ...] = ()
    """Names that did not come back, each with the reason."""
    dropped: int = 0
    """How many printed lines were lost because the disk was full."""
    waiting: Waiting | None = None
    """Kept if the rank ends in the collective."""
    place: str = ""
    """Where its main thread was at ``placed``, when ranks waited for long: ``Cell In[3], line 6, train``."""
    placed: float = 0.0
    entered: dict[str, int] = field(default_factory=dict)
    """How many collectives of each group the rank had entered at ``counted``; a missing group means none."""
    counted: float = 0.0
    proving: bool = False
    """Whether its strategy follows the first steps now, to prove that it may divide them."""
    proved: float = 0.0
    """Seconds that this took, once it is over."""

    @property
    def waits_in(self) -> Waiting | None:
        """The collective in which the rank is now; None for one that has ended."""
        return self.waiting if self.state == "running" else None


@dataclass(frozen=True)
class Stage(Record):
    """A part of a job's start on hosts: what it waits for, since when, and how long it took; 0 while it goes on."""

    text: str
    began: float
    seconds: float = 0.0
    percent: int = 0
    """How much of it is done, where that is known."""


@dataclass(frozen=True)
class JobState(Record):
    """A job after one event of its journal; ``seq`` is the number of this event."""

    job: str = ""
    name: str | None = None
    label: str = ""
    state: str = "submitted"
    """submitted, starting, running, stopping, or one of ``FINAL_STATES``."""
    world_size: int = 0
    submitted: float = 0.0
    ended: float = 0.0
    reason: str = ""
    first_failure: int | None = None
    ranks: dict[int, RankState] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    """Why it failed: what the failure itself does not say."""
    stall: Stall | None = None
    """Kept when the job ends while it stalls."""
    driver: dict[str, Any] | None = None
    attempt: int = 0
    restarts: int = 0
    """How often the ranks were started again after a failure."""
    queued: str = ""
    """While the job waits for the launcher's nodes: ``position 3: waiting for GPUs``, as the launcher reports it."""
    stages: tuple[Stage, ...] = ()
    seq: int = 0

    @property
    def stage(self) -> str:
        """What the start waits for now, or the first steps; empty if that is over, or not known."""
        if self.state == "running" and any(rank.proving for rank in self.ranks.values()):
            return PROVING
        last = self.stages[-1] if self.state == "starting" and self.stages else None
        if last is None or last.seconds:
            return ""
        return f"{last.text}, {last.percent} %" if last.percent else last.text

    @property
    def final(self) -> bool:
        return self.state in FINAL_STATES

    @property
    def stalled(self) -> bool:
        """Whether no rank makes progress now."""
        return self.stall is not None and self.state in ("starting", "running")

    def failures(self) -> list[RankState]:
        """Ranks that failed or were killed: first ``first_failure``, then in order of time.

        Ranks that were stopped because of a failure, or because the job stalled, are not included.
        """
        if self.stall is not None and self.stall.ends and self.first_failure is None:
            return []
        failed = [rank for rank in self.ranks.values() if rank.state in ("failed", "killed", "lost")]
        failed.sort(key=lambda rank: (rank.error.t if rank.error else rank.ended, rank.rank))
        return sorted(failed, key=lambda rank: rank.rank != self.first_failure)

    def places(self, ranks: Iterable[int], since: float) -> list[tuple[int, str]]:
        """Rank and place, of those that were asked after ``since``."""
        known = [self.ranks[number] for number in ranks if number in self.ranks]
        return [(rank.rank, rank.place) for rank in known if rank.place and rank.placed > since]

    def differences(self) -> list[list[int]]:
        """Ranks that wait at the same number of a group, each in another collective: one rank for each."""
        points: dict[tuple[str, int], dict[tuple[str, int], int]] = {}
        for number, rank in sorted(self.ranks.items()):
            if waiting := rank.waits_in:
                points.setdefault((waiting.group, waiting.number), {}).setdefault(waiting.call, number)
        return [list(found.values()) for found in points.values() if len(found) > 1]

    def awaited(self, waiting: Waiting) -> list[int]:
        """The ranks for which a collective waits: they are known not to have entered it."""
        members = range(self.world_size) if waiting.members is None else waiting.members
        ranks = [self.ranks[number] for number in members if number in self.ranks]
        return [rank.rank for rank in ranks if _is_behind(rank, waiting)]


def _is_behind(rank: RankState, waiting: Waiting) -> bool:
    """Whether the rank is known not to have entered. Counts from before the wait may be old, unless it has ended."""
    known = rank.counted > waiting.since or rank.state in RANK_ENDS
    return known and rank.entered.get(waiting.group, 0) < waiting.number


def fold(events: Iterable[Event], state: JobState | None = None) -> JobState:
    """The state after ``events``, from ``state`` on."""
    state = state or JobState()
    for event in events:
        state = apply(state, event)
    return state


def apply(state: JobState, event: Event) -> JobState:
    """The state after one event. Events after the job's end are ignored, so a final state does not change.

    Events that were read are checked (``events.KINDS``): a damaged one never comes here.
    """
    state = replace(state, seq=event.seq)
    if state.final:
        return state
    if event.kind.startswith("rank.") and event.rank is not None:
        rank = state.ranks.get(event.rank, RankState(event.rank))
        return replace(state, ranks={**state.ranks, event.rank: _apply_rank(rank, event)})
    return _apply_job(state, event)


def _apply_job(state: JobState, event: Event) -> JobState:
    data = event.data
    if event.kind == "job.submitted":
        return replace(
            state,
            job=state.job or data.get("job", ""),
            name=data.get("name", state.name),
            label=data.get("label", state.label),
            world_size=data.get("world_size", state.world_size),
            submitted=event.t,
        )
    if event.kind == "job.driver":
        return replace(state, driver=data.get("process"))
    if event.kind == "job.starting":
        return replace(
            state,
            state="starting",
            attempt=data.get("attempt", 1),
            restarts=data.get("restarts", 0),
            world_size=data.get("world_size", state.world_size),
            ranks={},
            stall=None,
            reason="",
        )
    if event.kind == "job.engine":
        return replace(state, queued=_in_queue(data) if data["state"] == "queued" else "")
    if event.kind == "job.stage":
        if percent := int(data.get("percent", 0)):
            return replace(
                state, stages=(*state.stages[:-1], *(replace(one, percent=percent) for one in state.stages[-1:]))
            )
        stage = Stage(data["text"], event.t, float(data.get("seconds", 0)))
        return replace(state, stages=(*_over(state.stages, event.t), stage))
    if event.kind == "job.running":
        return (
            replace(state, state="running", stages=_over(state.stages, event.t)) if state.state == "starting" else state
        )
    if event.kind == "job.stopping":
        return replace(state, state="stopping", reason=data.get("reason", ""))
    if event.kind == "job.stalled":
        return replace(state, stall=Stall.from_json({**data, "told": event.t}))
    if event.kind == "job.resumed":
        return replace(state, stall=None)
    if event.kind == "job.note":
        return replace(state, notes=(*state.notes, data.get("text", "")))
    if event.kind == "job.ended":
        return replace(
            state,
            state=data.get("state", "failed"),
            queued="",
            ended=event.t,
            reason=data.get("reason", ""),
            first_failure=data.get("first_failure"),
            findings=tuple(map(Finding.from_json, data.get("findings", ()))),
        )
    return state


def _over(stages: tuple[Stage, ...], t: float) -> tuple[Stage, ...]:
    """The stages, of which none goes on any more."""
    if not stages or stages[-1].seconds:
        return stages
    return (*stages[:-1], replace(stages[-1], seconds=max(t - stages[-1].began, 0.001)))


def _in_queue(data: dict[str, Any]) -> str:
    position, reason = data.get("position"), data.get("reason")
    words = "in the launcher's queue" if position is None else f"position {int(position)}"
    return f"{words}: {reason}" if reason and isinstance(reason, str) else words


def _apply_rank(rank: RankState, event: Event) -> RankState:
    """The result is the same for every order in which the files of the rank and of its agent are read.

    The rank's own report of its end has priority over the exit status of its process.
    """
    data = event.data
    if event.kind == "rank.started":
        process = data.get("process", {})
        return replace(
            rank, node=event.node or "", host=process.get("host", ""), pid=process.get("pid", 0), started=event.t
        )
    if event.kind == "rank.ready":
        return replace(rank, state=rank.state if rank.state in RANK_ENDS else "running", ready=event.t)
    if event.kind == "rank.proving":
        return replace(rank, proving=not data["seconds"], proved=float(data["seconds"]))
    if event.kind == "rank.waiting":
        return replace(_counted(rank, event), waiting=Waiting.from_json(data))
    if event.kind == "rank.resumed":
        return replace(rank, waiting=None)
    if event.kind == "rank.entered":
        return _counted(rank, event)
    if event.kind == "rank.place":
        return replace(rank, place=data["place"], placed=event.t)
    if event.kind == "rank.failed":
        return replace(rank, state="failed", error=ErrorRecord.from_json(data["error"]), why="", ended=event.t)
    if event.kind == "rank.interrupted":
        return replace(rank, state="interrupted", why="", ended=event.t)
    if event.kind == "rank.result":
        left = tuple((str(name), str(why)) for name, why in data.get("left", ()))
        return replace(rank, results=tuple(data.get("names", ())), left=left)
    if event.kind == "rank.dropped":
        return replace(rank, dropped=rank.dropped + int(data["lines"]))
    if event.kind == "rank.done":
        return replace(rank, state="done", why="", ended=event.t)
    if event.kind == "rank.exited":
        if rank.state in RANK_ENDS:
            return replace(rank, code=data.get("code"))
        state = data.get("state", "killed")
        return replace(rank, state=state, code=data.get("code"), why=data.get("why", ""), ended=event.t)
    return rank


def _counted(rank: RankState, event: Event) -> RankState:
    counts = event.data["counts"]
    return replace(rank, entered={str(group): int(count) for group, count in counts.items()}, counted=event.t)
