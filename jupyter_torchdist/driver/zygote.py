"""The process that starts drivers. What a driver needs is imported before its job comes, so no job waits for that.

It has no threads. Each driver has its own session, so it survives the exit of this process and of the kernel.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..protocol import codec
from ..protocol.process import ProcessId

Line = dict[str, Any]
Start = Callable[[bytes], int]
"""Start a driver with its line, and return its process's number."""


def serve(start: Start, settle: Callable[[], None] = lambda: None) -> None:
    """Start a driver for each JSON line on standard input. Return at end of file.

    ``settle`` is called after each start. For each driver, standard output gets ``{"job_root", "process"}``, and
    ``{"job_root", "code"}`` when the driver has exited: an exit code, or minus the signal's number.
    """
    drivers: dict[int, str] = {}

    def on_child(*_: object) -> None:
        for pid in list(drivers):
            with contextlib.suppress(ChildProcessError):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    _say(job_root=drivers.pop(pid), code=os.waitstatus_to_exitcode(status))

    signal.signal(signal.SIGCHLD, on_child)
    while (line := sys.stdin.buffer.readline()).endswith(b"\n"):  # a kernel that dies may leave a partial line
        job_root = codec.loads(line)["job_root"]
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = start(line)
        drivers[pid] = job_root
        _say(job_root=job_root, process=ProcessId.of(pid).to_json())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        settle()


def forking(drive: Callable[[Line], None]) -> Start:
    """Each driver is a fork of this process, and calls ``drive``."""

    def start(line: bytes) -> int:
        pid = os.fork()
        if pid == 0:
            _be_a_driver(drive, codec.loads(line))
        return pid

    return start


class Spares:
    """Each driver is a new interpreter, for systems whose frameworks do not survive a fork (macOS).

    One waits for the next job. It calls ``wait_for_a_job``.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._spare: subprocess.Popen[bytes] | None = None

    def keep(self) -> None:
        """Have one wait. It ends with this process, because its standard input ends."""
        if self._spare is None or self._spare.poll() is not None:
            self._spare = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=2, start_new_session=True)

    def __call__(self, line: bytes) -> int:
        self.keep()
        spare, self._spare = self._spare, None
        assert spare is not None
        assert spare.stdin is not None
        with spare.stdin as orders:
            orders.write(line)
        spare.returncode = 0  # ``serve`` takes its exit status
        return spare.pid


def wait_for_a_job(drive: Callable[[Line], None]) -> None:
    """Call ``drive`` with the line on standard input, in an interpreter of ``Spares``."""
    if (line := sys.stdin.buffer.readline()).endswith(b"\n"):
        drive(codec.loads(line))


def _be_a_driver(drive: Callable[[Line], None], value: Line) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)  # standard output is the zygote's protocol
        drive(value)
        code = 0
    except BaseException:  # noqa: BLE001  # top level of this process
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _say(**words: Any) -> None:
    with contextlib.suppress(OSError):  # the reader is gone; end of file on standard input follows
        os.write(1, codec.dumps(words).encode("ascii") + b"\n")
