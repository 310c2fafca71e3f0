"""Asks the ranks of a running job for their stacks, and waits for the answers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from ..protocol.disk import open_plain
from ..protocol.errors import UserError
from ..protocol.events import Event
from ..protocol.state import RANK_ENDS, JobState, RankState
from . import answers
from .job import Job

PATIENCE = 10.0
"""Seconds to wait for the answers: a host may be out of reach."""

MOST = 4 * 1024 * 1024
"""Bytes of one rank's answer that are read: user code can write into the file."""


@dataclass(frozen=True)
class RankStack:
    """Where one rank is. ``place`` and ``text`` are empty if it did not answer."""

    rank: int
    host: str
    place: str
    """The user's line: ``Cell In[3], line 6, in DataLoader``."""
    text: str
    """The stack of each thread, the main thread last, as ``faulthandler`` writes it; then those of its workers."""


def of(job: Job) -> list[RankStack]:
    """The stacks of all ranks that are alive, by rank. Takes about a second.

    Raises ``UserError`` when there is no such rank, and what ``Job.revive`` raises.
    """
    state = job.state
    if state.final:
        hint = f"`%dist show {job.id}` says how, `%dist diagnose {job.id}` why"
        raise UserError(f"job {job.id} has ended: its ranks have no stacks any more", hint)
    alive = _alive(state)
    if not alive:
        why = f" ({state.queued})" if state.queued else ""
        raise UserError(
            f"no rank of job {job.id} has started yet{why}", f"ask again when `%dist show {job.id}` lists ranks"
        )
    job.ask_stacks()
    found = answers.of(job, "rank.place", state.seq, PATIENCE, lambda state: {rank.rank for rank in _alive(state)})
    return [_stack(job, rank, found.get(rank.rank)) for rank in sorted(alive, key=lambda rank: rank.rank)]


def _alive(state: JobState) -> list[RankState]:
    return [rank for rank in state.ranks.values() if rank.pid and rank.state not in RANK_ENDS]


def _stack(job: Job, rank: RankState, answer: Event | None) -> RankStack:
    if answer is None or not answer.data["place"]:
        return RankStack(rank.rank, rank.host, "", "")
    begin, end = answer.data.get("begin", 0), answer.data.get("end", 0)
    text = _read(job.paths.node(rank.node).stacks(rank.rank), begin, end)
    return RankStack(rank.rank, rank.host, answer.data["place"], text)


def _read(path: Path, begin: int, end: int) -> str:
    """These bytes of a file, which may still be on their way from a host."""
    until = time.monotonic() + PATIENCE
    data = b""
    while time.monotonic() < until:
        try:
            with open_plain(path) as file:
                file.seek(max(begin, 0))
                data = file.read(min(max(end - begin, 0), MOST))
        except OSError:
            data = b""
        if len(data) >= min(end - begin, MOST):
            break
        time.sleep(0.05)
    return data.decode("utf-8", "replace")
