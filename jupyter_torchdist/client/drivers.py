"""Drivers: one process for each job, detached from its client, forked from a zygote that has imported their modules."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..protocol import codec
from ..protocol.errors import LaunchError
from ..protocol.paths import JobPaths, runtime_dir
from ..protocol.process import ProcessId
from ..protocol.world import World
from ..store.files import private

COMMAND = ("-m", "jupyter_torchdist.driver")

TAKING = 30.0
"""Seconds within which a driver must take a job; a new interpreter on a busy machine needs about one."""


@dataclass
class Started:
    """A process that this process started, and its output (a file without a name, so that no file is left over)."""

    process: subprocess.Popen[bytes]
    log: BinaryIO

    def words(self) -> str:
        """The end of the process's output, normally empty."""
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), 4000, max(0, size - 4000)).decode("utf-8", "backslashreplace").strip()

    def disown(self) -> None:
        """Let the process outlive this one, without a warning from Popen."""
        self.log.close()
        self.process.returncode = self.process.poll() or 0


class Zygote:
    """The process that forks drivers (``driver/zygote.py``). It ends with this process, because its stdin ends."""

    def __init__(self, started: Started) -> None:
        self.started = started
        assert started.process.stdin is not None
        assert started.process.stdout is not None
        self._orders, self._answers = started.process.stdin, started.process.stdout
        os.set_blocking(self._answers.fileno(), False)
        self._lock = threading.Lock()
        self._partial = b""
        self._drivers: dict[str, ProcessId] = {}
        self._codes: dict[str, int] = {}

    @property
    def alive(self) -> bool:
        return self.started.process.poll() is None

    def order(self, line: bytes) -> bool:
        """Send an order to the zygote. Returns whether that was possible."""
        try:
            with self._lock:
                self._orders.write(line)
                self._orders.flush()
        except (OSError, ValueError):  # it has ended, or another thread closed the pipe
            return False
        return True

    def code(self, job_root: str) -> int | None:
        """The exit code of the job's driver, if the driver ended and the zygote reported it."""
        self._listen()
        return self._codes.get(job_root)

    def has_driver(self, job_root: str) -> bool:
        """Whether the job's driver is alive, or may still be forked."""
        alive = self.alive  # read before the answers, so that the last answer is not missed
        if self.code(job_root) is not None:
            return False
        driver = self._drivers.get(job_root)
        return alive or (driver is not None and driver.alive())

    def end_driver(self, job_root: str) -> None:
        """End a driver that does not react, or the zygote if it has not forked the driver."""
        if driver := self._drivers.get(job_root):
            driver.signal(signal.SIGKILL)
        else:
            self.end()

    def _listen(self) -> None:
        with self._lock:
            while said := self._read():
                *lines, self._partial = (self._partial + said).split(b"\n")
                for line in lines:
                    value = codec.loads(line)
                    if "process" in value:
                        self._drivers[value["job_root"]] = ProcessId.from_json(value["process"])
                    else:
                        self._codes[value["job_root"]] = value["code"]

    def _read(self) -> bytes:
        try:
            return os.read(self._answers.fileno(), 65536)
        except (BlockingIOError, ValueError):
            return b""

    def end(self) -> None:
        """End the zygote; drivers continue. The zygote's output stays readable."""
        with contextlib.suppress(OSError):
            self._orders.close()
        self.started.process.kill()
        self.started.process.wait()
        self._answers.close()


class DriverPool:
    """Starts a driver for each job. Thread-safe; it never forks this process or changes its environment.

    ``command`` are the interpreter's arguments (a fake in tests).
    """

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = tuple(command)
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self.zygote: Zygote | None = None
        self.taking_up: list[Started] = []
        self.closed = False

    def warm(self) -> None:
        """Start the zygote, unless there is one. Raises ``LaunchError``."""
        with self._lock:
            self._reap()
            if not self.closed:
                self._living_zygote()

    def hand(self, paths: JobPaths, blobs: Path, world: World, taken: Callable[[], bool]) -> None:
        """Give the job to a driver and wait until ``taken`` says that the driver has it.

        Raises ``LaunchError`` with the driver's output when the driver dies first or does not react.
        """
        root = str(paths.root)
        line = {"job_root": root, "blobs": str(blobs), "world": world.to_json()}
        data = codec.dumps(line).encode("ascii") + b"\n"
        for last in (False, True):  # the zygote may have died; of two drivers only one gets the job's lock
            with self._lock:
                self._reap()
                zygote = self._living_zygote()
                ordered = zygote.order(data)
            if ordered and self._await_taken(zygote, root, taken):
                return
            if last or zygote.code(root) is not None:
                raise LaunchError(
                    f"the driver of job {paths.job} ended before it started the job", _remedy(zygote.started)
                )

    def attach(self, paths: JobPaths) -> subprocess.Popen[bytes]:
        """Start a new driver for a job whose driver died, without waiting for it. Raises ``LaunchError``."""
        driver = self._start("--attach", str(paths.root))
        if driver.process.stdin is not None:
            driver.process.stdin.close()
        with self._lock:
            self.taking_up.append(driver)
        return driver.process

    def reap(self) -> None:
        """Take the exit status of drivers that ended, so that no zombie is left."""
        with self._lock:
            self._reap()

    def close(self) -> None:
        """End the zygote and start no other. Drivers continue. Does nothing in a forked child."""
        if os.getpid() != self.owner:
            return
        with self._lock:
            self.closed = True
            atexit.unregister(self.close)
            self._drop_zygote()
            self._reap()
            for driver in self.taking_up:
                driver.disown()
            self.taking_up.clear()

    def _reap(self) -> None:
        for driver in [driver for driver in self.taking_up if driver.process.poll() is not None]:
            self.taking_up.remove(driver)
            driver.log.close()

    def _living_zygote(self) -> Zygote:
        if self.zygote is None or not self.zygote.alive:
            self._drop_zygote()
            self.zygote = Zygote(self._start("--zygote", answers=True))
        return self.zygote

    def _drop_zygote(self) -> None:
        zygote, self.zygote = self.zygote, None
        if zygote is not None:
            zygote.end()

    def _await_taken(self, zygote: Zygote, root: str, taken: Callable[[], bool]) -> bool:
        """False if the driver ended, or if the zygote ended before forking it. Raises ``LaunchError``."""
        deadline = time.monotonic() + TAKING
        pause = 0.001
        while not taken():
            if not zygote.has_driver(root):
                return taken()
            if time.monotonic() > deadline:
                zygote.end_driver(root)
                raise LaunchError(f"the driver did not start the job within {TAKING:.0f} s", _remedy(zygote.started))
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
        return True

    def _start(self, *arguments: str, answers: bool = False) -> Started:
        if not sys.executable:
            raise LaunchError("sys.executable is empty, so no driver can be started", "start Python by its full path")
        log = tempfile.TemporaryFile(dir=private(runtime_dir()))  # noqa: SIM115  # open as long as the driver is ours
        try:
            process = subprocess.Popen(
                [sys.executable, *self._command, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if answers else log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            log.close()
            raise LaunchError(
                f"no driver could be started: {error}", "check the limit on processes (ulimit -u)"
            ) from error
        return Started(process, log)


def _remedy(driver: Started) -> str:
    words = driver.words()
    said = f"it said: {words}" if words else "it said nothing"
    return f"{said}\n    run the cell again; `%dist doctor` checks this machine"


_pool: DriverPool | None = None
_pool_lock = threading.Lock()


def pool() -> DriverPool:
    """The pool of this process, or a new one after ``close``; closed when the process exits."""
    global _pool
    with _pool_lock:
        if _pool is None or _pool.closed or _pool.owner != os.getpid():
            _pool = DriverPool()
            atexit.register(_pool.close)
        return _pool
