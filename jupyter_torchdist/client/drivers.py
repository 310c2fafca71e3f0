"""Drivers: one process a job, detached from whoever started it. A spare one waits, so no start lies on a job's path."""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from ..protocol import codec
from ..protocol.errors import LaunchError
from ..protocol.paths import JobPaths, runtime_dir
from ..store.files import private

COMMAND = ("-m", "jupyter_torchdist.driver")

REFILL_DELAY = 0.5
"""Seconds before the next spare starts, so that its start does not compete with the job's."""

TAKING = 30.0
"""Seconds a driver may take to take a job; a new interpreter on a busy machine needs about one."""


@dataclass
class Started:
    """A driver process that this one started, and what it printed (a file without a name: none is left behind)."""

    process: subprocess.Popen[bytes]
    log: BinaryIO

    def words(self) -> str:
        """The end of what it printed, normally nothing."""
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), 4000, max(0, size - 4000)).decode("utf-8", "backslashreplace").strip()

    def disown(self) -> None:
        """Let it outlive this process, which Popen would warn of."""
        self.log.close()
        self.process.returncode = self.process.poll() or 0


class DriverPool:
    """Keeps one spare driver. Safe in threads; nothing of it forks this process or touches its environment.

    ``command`` are the interpreter's arguments (a fake driver in tests). The spare ends when this process does:
    it reads the end of its stdin.
    """

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = tuple(command)
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self.spare: Started | None = None
        self.running: list[Started] = []
        self._timer: threading.Timer | None = None
        self.closed = False

    def warm(self) -> None:
        """Start the spare if there is none. Raises ``LaunchError``."""
        with self._lock:
            self._reap()
            if not self.closed and (self.spare is None or self.spare.process.poll() is not None):
                self._drop_spare()
                self.spare = self._start("--spare")

    def hand(self, paths: JobPaths, line: dict[str, Any], taken: Callable[[], bool]) -> None:
        """Give the job to a driver and wait until ``taken`` says that it drives.

        Raises ``LaunchError`` with the driver's own words when it dies first, or takes no notice.
        """
        with self._lock:
            self._reap()
            driver, self.spare = self.spare, None
        data = codec.dumps(line).encode("ascii") + b"\n"
        if driver is None or not _give(driver, data):
            if driver is not None:
                self._bury(driver)
            driver = self._start("--spare")
            if not _give(driver, data):
                self._bury(driver)
                raise LaunchError(f"the driver of job {paths.job} did not start", _remedy(driver))
        self._adopt(driver)
        self._await_taken(driver, paths, taken)
        self._refill()

    def attach(self, paths: JobPaths) -> None:
        """Start a driver for a job whose own one died; does not wait for it. Raises ``LaunchError``."""
        driver = self._start("--attach", str(paths.root))
        if driver.process.stdin is not None:
            driver.process.stdin.close()
        self._adopt(driver)

    def reap(self) -> None:
        """Take the exit status of drivers that ended, so that no zombie stays."""
        with self._lock:
            self._reap()

    def close(self) -> None:
        """End the spare, and start no other. Drivers of jobs go on. In a forked child it does nothing."""
        if os.getpid() != self.owner:
            return
        with self._lock:
            self.closed = True
            atexit.unregister(self.close)
            if self._timer is not None:
                self._timer.cancel()
            self._drop_spare()
            self._reap()
            for driver in self.running:
                driver.disown()
            self.running.clear()

    def _adopt(self, driver: Started) -> None:
        with self._lock:
            self.running.append(driver)

    def _reap(self) -> None:
        for driver in [driver for driver in self.running if driver.process.poll() is not None]:
            self.running.remove(driver)
            driver.log.close()

    def _refill(self) -> None:
        with self._lock:
            if self.closed or self.spare is not None:
                return
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(REFILL_DELAY, self._refill_quietly)
            self._timer.daemon = True
            self._timer.start()

    def _refill_quietly(self) -> None:
        with contextlib.suppress(LaunchError):  # the next job tries again, and says it
            self.warm()

    def _drop_spare(self) -> None:
        spare, self.spare = self.spare, None
        if spare is not None:
            self._bury(spare)

    @staticmethod
    def _bury(driver: Started) -> None:
        """End a driver that has no job. Its log stays readable."""
        if driver.process.stdin is not None:
            with contextlib.suppress(OSError):
                driver.process.stdin.close()
        driver.process.kill()
        driver.process.wait()

    def _await_taken(self, driver: Started, paths: JobPaths, taken: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TAKING
        pause = 0.001
        while not taken():
            if driver.process.poll() not in (None, 0):
                if taken():
                    return
                raise LaunchError(f"the driver of job {paths.job} died before it took the job", _remedy(driver))
            if time.monotonic() > deadline:
                driver.process.kill()
                raise LaunchError(
                    f"the driver of job {paths.job} did not take the job in {TAKING:.0f} s", _remedy(driver)
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def _start(self, *arguments: str) -> Started:
        if not sys.executable:
            raise LaunchError("this Python does not know its own path (sys.executable)", "start it by its full path")
        log = tempfile.TemporaryFile(dir=private(runtime_dir()))  # noqa: SIM115  # open as long as the driver is ours
        try:
            process = subprocess.Popen(
                [sys.executable, *self._command, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            log.close()
            raise LaunchError(f"no driver could be started: {error}", "check the limits on processes") from error
        return Started(process, log)


def _give(driver: Started, line: bytes) -> bool:
    """Whether the driver was there to read the line."""
    assert driver.process.stdin is not None
    try:
        driver.process.stdin.write(line)
        driver.process.stdin.close()
    except OSError:
        return False
    return True


def _remedy(driver: Started) -> str:
    words = driver.words()
    said = f"it said: {words}" if words else "it said nothing"
    return f"{said}\n    run the cell again; `%dist doctor` checks this machine"


_pool: DriverPool | None = None
_pool_lock = threading.Lock()


def pool() -> DriverPool:
    """This process's pool, a new one after ``close``; closed when the process exits."""
    global _pool
    with _pool_lock:
        if _pool is None or _pool.closed or _pool.owner != os.getpid():
            _pool = DriverPool()
            atexit.register(_pool.close)
        return _pool
