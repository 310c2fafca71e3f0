"""Jobs and their ranks: a line, a table, a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Protocol

from ..diagnosis import live
from ..protocol.bundle import Manifest
from ..protocol.feed import Wait
from ..protocol.gauges import Gauges
from ..protocol.plan import Plan
from ..protocol.spec import JobSpec
from ..protocol.state import RANK_ENDS, JobState, RankState, Waiting
from . import wording
from .failure_text import because, failure, lost_lines
from .plan_tables import plan_table, receipt_table
from .wording import ago, count, duration, first_line, indent, size, table


class Row(Protocol):
    """One line of the jobs table: a ``JobState``, or a summary in the catalog. Times in seconds since the epoch."""

    @property
    def job(self) -> str: ...
    @property
    def name(self) -> str | None: ...
    @property
    def label(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    @property
    def submitted(self) -> float: ...
    @property
    def ended(self) -> float: ...


_WORDS = {"timed_out": "timed out"}

MARKS = {"succeeded": "✓", "failed": "✗", "cancelled": "■", "timed_out": "✗", "lost": "✗"}
"""One character for each final state; a running job has none."""


def state_word(state: Row) -> str:
    """``running``, ``timed out``…"""
    return _WORDS.get(state.state, state.state)


def title(state: JobState) -> str:
    """The job's name (else the label of its cell) and its id."""
    called = state.name or state.label
    return f"{called} ({state.job})" if called else state.job


def hosts(state: JobState) -> list[str]:
    """Names of the hosts on which the ranks run, in order of rank."""
    return list(dict.fromkeys(rank.host for _, rank in sorted(state.ranks.items()) if rank.host))


def where(state: JobState) -> str:
    """``2 ranks on box``, ``64 ranks on 8 hosts``."""
    ranks = count(state.world_size or len(state.ranks), "rank")
    names = hosts(state)
    if not names:
        return ranks
    return f"{ranks} on {names[0]}" if len(names) == 1 else f"{ranks} on {len(names)} hosts"


def elapsed(state: Row, now: float) -> float:
    """Seconds from submission to the end, or to ``now``."""
    return max((state.ended or now) - state.submitted, 0.0) if state.submitted else 0.0


def headline(state: JobState, now: float) -> str:
    """One line: state, ranks, time, and the reason of a failure."""
    waits = state.queued and state.state == "starting"
    running = "stalled" if state.stalled else ": ".join(filter(None, [state_word(state), state.stage]))
    word = f"queued, {state.queued}" if waits else running
    parts = [word, where(state), duration(elapsed(state, now))]
    if state.reason and state.state != "succeeded":
        parts.append(state.reason)
    mark = MARKS.get(state.state)
    return (f"{mark} " if mark else "") + " · ".join(parts)


PLACES = 4
"""Of how many ranks that are awaited the place is shown."""


def rank_line(state: JobState, rank: RankState) -> str:
    """The state of one rank, in a few words."""
    if rank.error:
        return f"failed: {first_line(rank.error.title)}"
    if waiting := waits(state, rank):
        return f"waiting in {_for_whom(collective(waiting), state.awaited(waiting))}"
    return rank.why or _rank_word(state, rank)


def _rank_word(state: JobState, rank: RankState) -> str:
    """The rank's state; for an interrupted rank the reason from the job's state: ``cancelled``, ``timed out``."""
    end = state.reason if state.state == "stopping" else state.state
    word = end if rank.state == "interrupted" and end in ("cancelled", "timed_out") else rank.state
    return _WORDS.get(word, word)


def waits(state: JobState, rank: RankState) -> Waiting | None:
    """The collective in which a rank waits now; None for a rank that has ended."""
    return None if state.final else rank.waits_in


def collective(waiting: Waiting) -> str:
    """``all_reduce #17``."""
    return f"{waiting.operation} #{waiting.number}"


def waits_of(state: JobState) -> list[Wait]:
    """One for each collective in which ranks wait now."""
    groups: dict[tuple[str, int, str], dict[int, Waiting]] = {}
    for number, rank in sorted(state.ranks.items()):
        if waiting := waits(state, rank):
            groups.setdefault((waiting.group, waiting.number, waiting.operation), {})[number] = waiting
    firsts = [(list(found), min(found.values(), key=attrgetter("since"))) for found in groups.values()]
    return [
        {
            "ranks": ranks,
            "collective": collective(first),
            "awaited": state.awaited(first),
            "since": first.since,
        }
        for ranks, first in firsts
    ]


def stall_line(state: JobState, now: float) -> str:
    """The words of a job that stalls now; empty while ranks make progress, and at the end."""
    if state.stall is None or not state.stalled:
        return ""
    return wording.stalled(state.stall, now)


def waiting_lines(state: JobState, now: float) -> list[str]:
    """``ranks 0-2 wait in all_reduce #17 for rank 3, for 12.3 s``; then where the ranks are that are awaited.

    Of a job that stalls this is one line: ``stall_line``.

    A rank that holds the GIL cannot say how far it is. So all that do not wait are shown where none is known.

    Then, of ranks that wait at the same point in different collectives, who calls what.
    """
    if line := stall_line(state, now):
        return [line]
    lines = []
    for wait in waits_of(state):
        lines.append(_waiting_line(wait, now))
        others = [rank.rank for rank in state.ranks.values() if rank.state == "running" and not rank.waiting]
        places = state.places(wait["awaited"] or others, wait["since"])[:PLACES]
        lines += [f"  rank {rank} is at {place}" for rank, place in places]
    return lines + [_difference(state, found) for found in state.differences()]


def _difference(state: JobState, ranks: Sequence[int]) -> str:
    """``ranks call different collectives: rank 0 all_reduce #3 at Cell In[2], line 4; rank 1 broadcast #3 at …``."""
    parts = []
    for number in ranks:
        waiting = state.ranks[number].waiting
        assert waiting is not None
        size_of = f" ({size(waiting.size)})" if waiting.size else ""
        at = "".join(f" at {place}" for _, place in state.places([number], waiting.since))
        parts.append(f"rank {number} {collective(waiting)}{size_of}{at}")
    return f"ranks call different collectives: {'; '.join(parts)}"


def _waiting_line(wait: Wait, now: float) -> str:
    verb = "waits" if len(wait["ranks"]) == 1 else "wait"
    place = _for_whom(wait["collective"], wait["awaited"])
    return f"{wording.ranks(wait['ranks'])} {verb} in {place}, for {duration(now - wait['since'])}"


def _for_whom(collective: str, whom: Sequence[int]) -> str:
    return collective + (f" for {wording.ranks(whom)}" if whom else "")


def jobs_table(states: Sequence[Row], now: float) -> str:
    """The table of jobs, in the given order."""
    if not states:
        return "no jobs yet: run a cell under %%distribute, or `torchdist run script.py`"
    rows = [
        (
            state.job,
            state.name or "",
            state_word(state),
            str(state.world_size),
            ago(state.submitted, now) if state.submitted else "",
            duration(elapsed(state, now)),
            state.label,
        )
        for state in states
    ]
    return table(("JOB", "NAME", "STATE", "RANKS", "STARTED", "TOOK", "CELL"), rows)


def ranks_table(state: JobState, gauges: Mapping[int, Gauges] | None = None) -> str:
    """One line for each rank; with columns for memory and GPU memory if any rank's values are known."""
    told = [(rank, (gauges or {}).get(number, Gauges())) for number, rank in sorted(state.ranks.items())]
    columns = {
        "RANK": [str(rank.rank) for rank, _ in told],
        "HOST": [rank.host for rank, _ in told],
        "PID": [str(rank.pid or "") for rank, _ in told],
        "MEMORY": [memory(state, rank, taken.memory, taken.memory_peak) for rank, taken in told],
        "GPU MEMORY": [memory(state, rank, taken.gpu_memory, taken.gpu_memory_peak) for rank, taken in told],
        "STATE": [rank_line(state, rank) for rank, _ in told],
        "RESULTS": [", ".join(rank.results) for rank, _ in told],
    }
    shown = {name: cells for name, cells in columns.items() if "MEMORY" not in name or any(cells)}
    return table(tuple(shown), zip(*shown.values(), strict=True))


def memory(state: JobState, rank: RankState, now: int | None, peak: int | None) -> str:
    """``1.2 GB``; for a rank that has ended ``peak 1.5 GB``; empty if unknown."""
    if rank.state in RANK_ENDS or state.final:
        return f"peak {size(peak)}" if peak is not None else ""
    return size(now) if now is not None else ""


def job_page(
    state: JobState,
    spec: JobSpec | None,
    plan: Plan | None,
    manifest: Manifest | None,
    now: float,
    gauges: Mapping[int, Gauges] | None = None,
    tracked: Sequence[str] = (),
) -> str:
    """Everything about one job: state, ranks, notes, error, receipt and plan, as far as they are known.

    ``tracked``: a sentence for each of its trackers.
    """
    parts = ["\n".join([title(state), headline(state, now), *waiting_lines(state, now)])]
    if plan and spec and gauges:
        parts += [f"{one.severity} {one.code}: {one.advice}" for one in live.of(state, plan, spec, gauges)]
    if over := [f"{stage.text} {duration(stage.seconds)}" for stage in state.stages if stage.seconds]:
        parts.append(f"start: {' · '.join(over)}")
    if proved := max((rank.proved for rank in state.ranks.values()), default=0.0):
        parts.append(f"the first steps were proved in {duration(proved)}")
    if state.ranks:
        parts.append(ranks_table(state, gauges))
    if tracked:
        parts.append("\n".join(tracked))
    if state.notes:
        parts.append("\n".join(f"note: {note}" for note in state.notes))
    parts += lost_lines(state)
    if failed := state.failures():
        parts.append(failure(state, failed))
    elif state.final:
        parts += because(state)
    if manifest:
        parts.append("captured:\n" + indent(receipt_table(manifest.receipt)))
        parts += [f"note: {note}" for note in manifest.notes]
    if plan:
        parts.append("plan:\n" + indent(plan_table(plan)))
    if spec and spec.source.strip():
        numbered = enumerate(spec.source.rstrip("\n").split("\n"), spec.first_line)
        parts.append(f"{spec.label}:\n" + "\n".join(f"{number:>5}  {line}" for number, line in numbered))
    return "\n\n".join(parts)
