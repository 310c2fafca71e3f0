"""Jobs whose driver is gone. If the job is on the driver's own disk, a new driver is started."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ...protocol.paths import JobPaths

ORPHAN_SECONDS = 0.5
"""A job on the driver's own disk gets a new driver after this time without one."""

RETRY_SECONDS = 2.0
DRIVER_TRIES = 5
"""A job is ended after so many new drivers have failed (its files are damaged)."""


@dataclass
class _Orphan:
    since: float
    process: subprocess.Popen[bytes] | None = None
    started: float = float("-inf")
    failed: int = 0


class Orphans:
    """Jobs without a connection to a driver, and the new drivers for them. ``log`` receives the drivers' output."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._orphans: dict[str, _Orphan] = {}
        self._arriving: list[subprocess.Popen[bytes]] = []

    @property
    def pids(self) -> set[int]:
        """Pids of drivers that their ``Popen`` will reap."""
        waited = [orphan.process for orphan in self._orphans.values() if orphan.process]
        return {process.pid for process in [*waited, *self._arriving]}

    def reap(self) -> None:
        self._arriving = [process for process in self._arriving if process.poll() is None]
        for orphan in self._orphans.values():
            if orphan.process is not None and orphan.process.poll() is not None:
                orphan.failed += orphan.process.returncode != 0  # 0: the old driver still has the job's lock
                orphan.process = None

    def claimed(self, job: str) -> None:
        """The job has a driver again, or was removed."""
        orphan = self._orphans.pop(job, None)
        if orphan is not None and orphan.process is not None:
            self._arriving.append(orphan.process)

    def hopeless(self, paths: JobPaths, lease: float | None, now: float) -> bool:
        """Whether no driver will ever take the job. If not, starts a driver when it is time.

        ``lease``: seconds that the job goes on without a driver on another machine; None for a job of this machine.
        """
        orphan = self._orphans.setdefault(paths.job, _Orphan(now))
        if lease is not None:
            return now - orphan.since > lease
        if orphan.process is not None or now - orphan.since <= ORPHAN_SECONDS:
            return False
        if paths.summary.exists() or not paths.spec.exists() or orphan.failed >= DRIVER_TRIES:
            return True
        if now - orphan.started > RETRY_SECONDS:
            orphan.started = now
            try:
                orphan.process = self._start(paths)
            except OSError:
                orphan.failed += 1
        return False

    def _start(self, paths: JobPaths) -> subprocess.Popen[bytes]:
        with open(self._log, "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "jupyter_torchdist.driver", "--attach", str(paths.root)],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
