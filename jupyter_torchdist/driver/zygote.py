"""The process from which drivers are forked. It has imported all that a driver needs, so no job waits for imports.

It has no threads. Each driver has its own session, so it survives the exit of this process and of the kernel.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from ..protocol import codec
from ..protocol.process import ProcessId

Line = dict[str, Any]


def serve(drive: Callable[[Line], None], settle: Callable[[], None] = lambda: None) -> None:
    """Fork a driver, which calls ``drive``, for each JSON line on standard input. Return at end of file.

    ``settle`` is called here after each fork. For each driver, standard output gets ``{"job_root", "process"}``, and
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
        value = codec.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if pid == 0:
            _be_a_driver(drive, value)
        drivers[pid] = value["job_root"]
        _say(job_root=value["job_root"], process=ProcessId.of(pid).to_json())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        settle()


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
