"""The rows of the panel, one a job. Ended jobs are read once, however many there are; only what runs is read again."""

from __future__ import annotations

import os
import threading
import time
from typing import TypedDict

from ..protocol.errors import JobNotFound, StoreError
from ..protocol.paths import Home, JobPaths
from ..protocol.state import JobState, fold
from ..store import catalog, jobdir, journal, liveness
from ..store.cache import JobSummary
from .glance import Glance, Progress

LOOK = 10.0
"""Seconds after which the directory of jobs is read again even if it seems unchanged, as it may on a network disk."""

SETTLED = 2.0
"""Seconds for which a directory that has just changed may change again with the same time stamp."""


PATIENCE = 0.15
"""Seconds for which one look reads why jobs ended, and where; the next looks do the rest, the oldest jobs."""


class Row(TypedDict):
    """One job. Times in seconds since the epoch, 0 for what has not happened."""

    job: str
    name: str | None
    label: str
    notebook: str
    state: str
    effective: str
    """``state``, or ``orphaned`` or ``unreachable``."""
    world_size: int
    submitted: float
    ended: float
    reason: str
    progress: Progress | None
    spark: list[float]
    gpus: list[str]
    """The UUIDs of those the plan has."""


class Listing:
    """All rows of a data directory, for any number of threads; one of them reads, the others take what it found."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._lock = threading.Lock()
        self._summaries: list[JobSummary] = []
        self._listed = -LOOK
        self._stamp = 0
        self._rows: list[Row] = []
        self._read = -LOOK
        self._ended: dict[str, Row] = {}
        self._going: dict[str, Going] = {}
        self._until = 0.0

    def rows(self, max_age: float = 0.0) -> list[Row]:
        """The newest first, as they were at most ``max_age`` seconds ago; not to be changed. Raises ``StoreError``."""
        asked = time.monotonic()
        with self._lock:
            if self._read < asked - max_age:
                began = time.monotonic()
                self._rows = self._look()
                self._read = began
            return self._rows

    def _look(self) -> list[Row]:
        self._list()
        self._until = time.monotonic() + PATIENCE
        rows = [row for summary in self._summaries if (row := self._row(summary))]
        present = {row["job"] for row in rows}
        for known in (self._ended, self._going):
            for job in known.keys() - present:
                del known[job]
        return rows

    def _list(self) -> None:
        """Read the catalog again where the directory of jobs has changed."""
        now = time.monotonic()
        stamp = _modified(self.home)
        if stamp == self._stamp and now - self._listed < LOOK:
            return
        self._summaries = catalog.jobs(self.home)
        self._listed = now
        self._stamp = stamp if abs(time.time() - stamp / 1e9) > SETTLED else 0

    def _row(self, summary: JobSummary) -> Row | None:
        """None for a job that was removed meanwhile."""
        job = summary.job
        if row := self._ended.get(job):
            return row
        paths = self.home.job(job)
        if summary.final and job not in self._going:
            if time.monotonic() > self._until:
                return row_of(JobState(state=summary.state), summary, summary.state, [])
            row = self._ended[job] = ended_row(paths, summary)
            return row
        row, final = self._going.setdefault(job, Going(paths, summary)).row()
        if final:
            del self._going[job]
            if row:
                self._ended[job] = row
        return row


class Going:
    """A job that has not ended: its state is folded on from where it was, its metrics are looked at."""

    def __init__(self, paths: JobPaths, summary: JobSummary) -> None:
        self._paths, self._summary = paths, summary
        self._state, self._offset = journal.asked_for(paths), 0
        self._gpus = gpus(paths)
        self._glance = Glance(paths)

    def row(self) -> tuple[Row | None, bool]:
        """How it is now (None: removed), and whether that is final."""
        try:
            state = self._now()
            effective = liveness.effective_state(self._paths, state)
        except (JobNotFound, StoreError):
            return None, True
        row = row_of(state, self._summary, effective, self._gpus)
        if not state.final:
            row["progress"], row["spark"] = self._glance.look()
        return row, state.final

    def _now(self) -> JobState:
        events, self._offset = journal.read(self._paths, self._offset)
        self._state = fold(events, self._state)
        if not events and (self._paths.summary.exists() or not self._offset):
            return journal.state(self._paths)
        return self._state


def ended_row(paths: JobPaths, summary: JobSummary) -> Row:
    """The row of a job that has ended and that the catalog knows."""
    try:
        state = journal.state(paths)
    except (JobNotFound, StoreError):
        state = JobState(job=summary.job, state=summary.state)
    return row_of(state, summary, summary.state, gpus(paths))


def row_of(state: JobState, summary: JobSummary, effective: str, on_gpus: list[str]) -> Row:
    """A row without progress."""
    return {
        "job": summary.job,
        "name": summary.name,
        "label": summary.label,
        "notebook": summary.notebook,
        "state": state.state,
        "effective": effective,
        "world_size": state.world_size or summary.world_size,
        "submitted": summary.submitted,
        "ended": state.ended or summary.ended,
        "reason": state.reason,
        "progress": None,
        "spark": [],
        "gpus": on_gpus,
    }


def gpus(paths: JobPaths) -> list[str]:
    """The UUIDs of the GPUs in the job's plan; none where it cannot be read."""
    try:
        return [gpu for node in jobdir.read_plan(paths).nodes for gpu in node.gpus]
    except (JobNotFound, StoreError):
        return []


def _modified(home: Home) -> int:
    """When a job was last added or removed, in ns since the epoch; 0: not to be told."""
    try:
        return os.stat(home.jobs).st_mtime_ns
    except OSError:
        return 0
