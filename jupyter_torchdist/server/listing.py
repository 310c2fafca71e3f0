"""The rows of the panel, one for each job. Ended jobs are read once; only running jobs are read again."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from operator import itemgetter
from typing import Annotated, Any, TypedDict

from ..protocol.errors import JobNotFound, StoreError
from ..protocol.feed import Progress, Wait
from ..protocol.paths import Home, JobPaths
from ..protocol.state import JobState, Stall
from ..store import catalog, gauges, jobdir, journal, liveness
from ..store.cache import JobSummary
from ..views import job_text
from .glance import Glance

LOOK = 10.0
"""Seconds after which the jobs directory is read again even if it looks unchanged, as it may on a network disk."""

SETTLED = 2.0
"""For so many seconds after a change, a directory may change again with the same time stamp."""


class Row(TypedDict):
    """One job. Times in seconds since the epoch; 0 means that it has not happened."""

    job: str
    name: str | None
    label: str
    notebook: str
    """The path of the notebook or of the kernel's session; empty for a job from a shell."""
    state: str
    effective: str
    """``state``, or ``orphaned`` or ``unreachable``."""
    world_size: int
    submitted: float
    ended: float
    reason: str
    progress: Progress | None
    samples: float | None
    """How many samples the job has trained with; None if unknown, and after the job's end."""
    spark: list[float]
    """The latest values of the job's first curve."""
    broken: list[str]
    """Curves whose last value is not a finite number. Not searched in a job that had ended when the server started."""
    wait: Wait | None
    """Ranks that wait in a collective, if any do; the longest wait."""
    stall: Annotated[Any, Stall] | None
    """Who holds up the others, if no rank makes progress now."""
    gpus: list[str]
    """The UUIDs of the plan's GPUs."""
    gpu_memory: tuple[int, int] | None
    """Bytes in use and total bytes of these GPUs; None if unknown, and after the job's end."""
    rerun_of: str
    """The job that was run again as this job; empty if this is no rerun."""
    damaged: bool
    """The job cannot be opened (``reason`` says why), only deleted."""


class Listing:
    """All rows of a data directory. Thread-safe: one thread reads, the other threads use its result."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._lock = threading.Lock()
        self._summaries: dict[str, JobSummary] = {}
        self._listed = -LOOK
        self._stamp = 0
        self._rows: dict[str, Row] = {}
        self._told: list[Row] = []
        self._read = -LOOK
        self._going: dict[str, Going] = {}

    def rows(self, max_age: float = 0.0) -> list[Row]:
        """The rows, newest first, at most ``max_age`` seconds old. Do not change them. Raises ``StoreError``."""
        asked = time.monotonic()
        with self._lock:
            if self._read < asked - max_age:
                began = time.monotonic()
                self._list()
                for job, going in list(self._going.items()):
                    self._look(job, going)
                self._told = list(self._rows.values())
                self._read = began
            return self._told

    def _list(self) -> None:
        """Find new and removed jobs, if the jobs directory has changed."""
        now = time.monotonic()
        stamp = _modified(self.home)
        if stamp == self._stamp and now - self._listed < LOOK:
            return
        summaries = {summary.job: summary for summary in catalog.jobs(self.home, self._summaries)}
        for job in self._going.keys() - summaries.keys():
            del self._going[job]
        self._rows = {job: self._rows.get(job) or self._new(summary) for job, summary in summaries.items()}
        self._summaries = summaries
        self._listed = now
        self._stamp = stamp if abs(time.time() - stamp / 1e9) > SETTLED else 0

    def _new(self, summary: JobSummary) -> Row:
        if not summary.final:
            self._going[summary.job] = Going(self.home.job(summary.job), summary)
        return row_of(summary)

    def _look(self, job: str, going: Going) -> None:
        row, final = going.row()
        if row is None:
            del self._rows[job]
        else:
            self._rows[job] = row
        if final:
            del self._going[job]


class Going:
    """A job that has not ended. Only new events are read for its state, and samples of its metrics."""

    def __init__(self, paths: JobPaths, summary: JobSummary) -> None:
        self._paths, self._row = paths, row_of(summary)
        self._state, self._offset = journal.asked_for(paths), 0
        self._glance = Glance(paths)
        self._gauges = gauges.GaugeFiles(paths)
        self._plan_gpus: dict[int, str] = {}

    def row(self) -> tuple[Row | None, bool]:
        """The job's current row (None: removed), and whether it is final."""
        try:
            state = self._now()
            effective = liveness.effective_state(self._paths, state)
        except (JobNotFound, StoreError):
            return None, True
        row = self._row.copy()
        row["state"], row["effective"], row["ended"] = state.state, effective, state.ended
        row["reason"] = state.reason or row["reason"]
        seen = self._glance.look()
        row["broken"] = seen.broken
        if not state.final:
            row["progress"], row["samples"], row["spark"] = seen.progress, seen.samples, seen.spark
            row["wait"] = min(job_text.waits_of(state), key=itemgetter("since"), default=None)
            row["stall"] = state.stall.to_json() if state.stall is not None and state.stalled else None
            row["gpu_memory"] = self._gpu_memory()
        return row, state.final

    def _gpu_memory(self) -> tuple[int, int] | None:
        if not self._row["gpus"]:
            return None
        if not self._plan_gpus:
            with contextlib.suppress(JobNotFound, StoreError):
                self._plan_gpus = jobdir.read_plan(self._paths).gpu_of_rank()
        self._gauges.look()
        return gauges.of_gpus(self._gauges.latest, self._plan_gpus)

    def _now(self) -> JobState:
        before = self._offset
        self._state, self._offset = journal.advanced(self._paths, self._state, before)
        if self._offset <= before and (self._paths.summary.exists() or not self._offset):
            return journal.state(self._paths)
        return self._state


def row_of(summary: JobSummary) -> Row:
    """A row without progress."""
    return {
        "job": summary.job,
        "name": summary.name,
        "label": summary.label,
        "notebook": summary.notebook,
        "state": summary.state,
        "effective": summary.state,
        "world_size": summary.world_size,
        "submitted": summary.submitted,
        "ended": summary.ended,
        "reason": summary.reason or summary.damage,
        "progress": None,
        "samples": None,
        "spark": [],
        "broken": [],
        "wait": None,
        "stall": None,
        "gpus": list(summary.gpus),
        "gpu_memory": None,
        "rerun_of": summary.rerun_of,
        "damaged": bool(summary.damage),
    }


def _modified(home: Home) -> int:
    """When a job was last added or removed, in ns since the epoch; 0 if unknown."""
    try:
        return os.stat(home.jobs).st_mtime_ns
    except OSError:
        return 0
