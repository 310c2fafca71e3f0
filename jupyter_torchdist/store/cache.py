"""Summaries of ended jobs in a SQLite file per host, so that listing a thousand jobs reads one file.

The cache is optional. If SQLite or its locks do not work (a network file system), or the file is damaged or lost,
the cache is empty and the job directories are read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from ..protocol import codec
from ..protocol.events import FINAL_STATES
from ..protocol.paths import Home

if TYPE_CHECKING:
    from sqlite3 import Connection


@dataclass(frozen=True)
class JobSummary:
    """One line of ``%dist``. Times in seconds since the epoch, 0 for what has not happened."""

    job: str
    name: str | None
    state: str
    """A ``JobState.state``, ``orphaned`` or ``unreachable``."""
    label: str
    world_size: int
    submitted: float
    ended: float
    notebook: str
    reason: str
    """Why it ended in this state; empty if no reason is needed."""
    gpus: tuple[str, ...]
    """The UUIDs of the GPUs in its plan."""
    rerun_of: str
    """The job that was run again as this job; empty if this is not a rerun."""
    damage: str
    """What is damaged in the files needed to open the job, as a sentence; empty if they are intact."""

    @property
    def final(self) -> bool:
        return self.state in FINAL_STATES


def load(home: Home) -> dict[str, JobSummary]:
    """The cached summaries by job; empty if there is no usable cache."""
    with contextlib.suppress(*_refusals()), _database(home) as database:
        rows = database.execute("SELECT job, summary FROM jobs").fetchall()
        known = {job: _summary(codec.loads(summary)) for job, summary in rows}
        return {job: summary for job, summary in known.items() if summary}
    return {}


_FIELDS = tuple(field.name for field in fields(JobSummary))


def _summary(value: dict[str, Any]) -> JobSummary | None:
    """None if an earlier version wrote it with fewer fields: the job's files are then read again."""
    if any(name not in value for name in _FIELDS):
        return None
    known = {name: value[name] for name in _FIELDS}
    return JobSummary(**{**known, "gpus": tuple(value["gpus"])})


def keep(home: Home, fresh: Iterable[JobSummary], gone: Iterable[str]) -> None:
    """Add summaries of ended jobs, remove jobs that were deleted."""
    added = [(summary.job, codec.dumps(asdict(summary))) for summary in fresh]
    removed = [(job,) for job in gone]
    if not added and not removed:
        return
    with contextlib.suppress(*_refusals()), _database(home) as database, database:
        database.executemany("INSERT OR REPLACE INTO jobs VALUES (?, ?)", added)
        database.executemany("DELETE FROM jobs WHERE job = ?", removed)


@contextlib.contextmanager
def _database(home: Home) -> Iterator[Connection]:
    import sqlite3  # Some Python builds have none.

    os.close(os.open(home.catalog, os.O_RDWR | os.O_CREAT, 0o600))
    connection = sqlite3.connect(home.catalog, timeout=0.5)
    try:
        # A rollback journal in memory: a crash may damage the cache, and a damaged cache is created again.
        connection.execute("PRAGMA journal_mode = MEMORY")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("CREATE TABLE IF NOT EXISTS jobs (job TEXT PRIMARY KEY, summary TEXT NOT NULL)")
        yield connection
    except sqlite3.OperationalError:
        raise
    except (sqlite3.DatabaseError, ValueError, TypeError):
        home.catalog.unlink()
        raise
    finally:
        connection.close()


def _refusals() -> tuple[type[Exception], ...]:
    try:
        import sqlite3
    except ImportError:
        return (ImportError,)
    return (sqlite3.Error, OSError, ValueError, TypeError)
