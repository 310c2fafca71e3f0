"""Removes what connections over SSH left on this node: agents, warm processes, code, replicas of jobs.

Files that cells wrote stay, and so does what a Jupyter on this node has (``$TORCHDIST_HOME``).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ..protocol.paths import JobPaths, queue_dir, runtime_dir, scratch_dir
from ..protocol.wire import agents, frames
from .shipping.replica import discard


def main(parents: Sequence[str]) -> None:
    """Write one frame, ``removed``, to standard output. ``parents``: where ``boot.py`` may have put code."""
    jobs = [job for welcome in agents.running() for job in welcome["jobs"]]
    warm = 0
    paths: list[str] = []
    kept: list[str] = []
    if not jobs:
        stopped = agents.stop()
        jobs = [job for welcome in stopped for job in welcome["jobs"]] + _held()
        warm = sum(len(welcome["warm"]) for welcome in stopped)
    if not jobs:
        _discard_jobs()
        paths, kept = _delete([Path(parent) for parent in parents])
    os.write(1, frames.encode({"type": "removed", "jobs": jobs, "warm": warm, "paths": paths, "kept": kept}))


def _held() -> list[str]:
    """Agents that do not end. Their jobs are not known."""
    found = []
    for path in runtime_dir().glob("agent-*/agent.lock"):
        with open(path) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(f"of {path.parent}, which does not answer")
    return found


def _discard_jobs() -> None:
    jobs = scratch_dir(os.environ) / "jobs"
    for root in jobs.iterdir() if jobs.is_dir() else ():
        discard(JobPaths(root))


def _delete(parents: Sequence[Path]) -> tuple[list[str], list[str]]:
    """Delete the rest, the code of this process last. Returns what is gone, and what stays."""
    found = [
        *runtime_dir().glob("agent-*"),
        *scratch_dir(os.environ).glob("blobs"),
        *scratch_dir(os.environ).glob("synced"),
        *scratch_dir(os.environ).glob("envs"),
    ]
    found += [path for parent in parents for pattern in (".code-*", "code-*") for path in parent.glob(pattern)]
    for path in sorted(found, key=lambda path: str(path) in sys.path):
        shutil.rmtree(path, ignore_errors=True)
    for folder in (scratch_dir(os.environ) / "jobs", scratch_dir(os.environ), runtime_dir(), queue_dir(), *parents):
        with contextlib.suppress(OSError):  # not empty, or not there
            folder.rmdir()
            found.append(folder)
    left = [path for path in found if path.exists()] + list(scratch_dir(os.environ).glob("jobs/*/work"))
    return [str(path) for path in found if path not in left], [str(path) for path in left]
