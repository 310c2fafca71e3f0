"""Decides since when no rank of a job makes progress. The time that this may take is learned from the job itself.

Times are in seconds on the driver's monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from ..protocol.state import RANK_ENDS, JobState, Stall

BEGINNING = 30.0
"""Least seconds for ranks before their first line, whatever ``--stall`` says: a machine may be slow to start them."""

WORKING = 10.0
"""So many times longer may ranks wait for one that is at work: it compiles, validates or saves."""

LONGER = 2.0
"""So many times the longest pause so far is a stall."""

FRESH = 10.0
"""A rank of which nothing was heard for so long may make progress."""

AT_WORK = 3.0
"""A rank that worked so long ago is at work: it is measured every two seconds."""


@dataclass(frozen=True)
class Sign:
    """When a rank made progress, when it made progress or worked, and when its agent said so."""

    progress: float
    work: float
    told: float


def watch(floor: float, stall: Stall | None) -> StallWatch:
    """For a job that stalls already where there is a ``stall``: an earlier driver has said so."""
    return StallWatch(floor, None if stall is None else time.monotonic() - (time.time() - stall.since))


class StallWatch:
    """What agents say of the ranks' progress, and what follows.

    ``floor``: the value of ``--stall``. ``since``: since when the job stalls, as an earlier driver has found.
    """

    def __init__(self, floor: float, since: float | None = None) -> None:
        self._floor = floor
        self._signs: dict[int, Sign] = {}
        self._last: Sign | None = None
        """The latest progress and work of all ranks so far, once all have begun."""
        self._idle = self._busy = 0.0
        """The longest pauses so far: without work, without progress."""
        self._since = since
        self._moves = None if since is None else since + floor / 2
        """Since when the job stalls; progress after ``_moves`` is the end of that."""

    def told(self, ranks: Iterable[tuple[int, float, float]], now: float) -> None:
        """From an agent: rank, seconds without progress, seconds without progress and work."""
        for rank, quiet, idle in ranks:
            self._signs[rank] = Sign(now - quiet, now - idle, now)

    def forget(self) -> None:
        """The ranks are new ones."""
        self._signs.clear()
        self._last = self._since = self._moves = None

    def at_work(self, now: float) -> set[int]:
        """Ranks that worked a moment ago."""
        return {rank for rank, sign in self._signs.items() if now - sign.work < AT_WORK}

    def since(self, state: JobState, now: float) -> float | None:
        """Since when the job stalls; None if it does not, or is not known to."""
        alive = [rank for rank in state.ranks.values() if rank.state not in RANK_ENDS]
        known = [self._signs[rank.rank] for rank in alive if rank.rank in self._signs]
        complete = len(known) == len(alive) > 0 and len(state.ranks) == state.world_size
        if not self._floor or not complete or any(now - sign.told > FRESH for sign in known):
            return self._since
        late = [self._signs[rank.rank] for rank in alive if not rank.ready]
        if self._moves is not None and max(sign.progress for sign in late or known) > self._moves:
            self._since = self._moves = None
        found = self._of(late, now) if late else self._of_all(known, state, now)
        if self._since is None and found is not None:
            self._since, self._moves = found, (found + now) / 2  # what agents say comes a moment late
        return self._since

    def _of(self, late: list[Sign], now: float) -> float | None:
        """Of ranks before their first line: the others may go on meanwhile."""
        work, progress = max(sign.work for sign in late), max(sign.progress for sign in late)
        return progress if now - work >= max(self._floor, BEGINNING) else None

    def _of_all(self, signs: list[Sign], state: JobState, now: float) -> float | None:
        latest = Sign(max(sign.progress for sign in signs), max(sign.work for sign in signs), now)
        if self._last is not None:
            self._idle = max(self._idle, latest.work - self._last.work)
            self._busy = max(self._busy, latest.progress - self._last.progress)
        self._last = latest
        if now - latest.work >= max(self._floor, LONGER * self._idle):
            return latest.progress
        waits = any(rank.waits_in for rank in state.ranks.values())
        patience = max(WORKING * self._floor, LONGER * self._busy)
        return latest.progress if waits and now - latest.progress >= patience else None
