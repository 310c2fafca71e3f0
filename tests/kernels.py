"""Kernels that are forked from one process which has imported what every kernel of the tests imports.

A kernel that imports IPython and torch for itself costs three seconds of a core, which is most of what a test of it
costs. These are the same kernels, driven through the same jupyter_client; only their interpreter began earlier.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import Any, NoReturn

import traitlets
from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning.local_provisioner import LocalProvisioner


class ForkServer:
    """The process that kernels are forked from. ``close`` ends it."""

    def __init__(self) -> None:
        words = [sys.executable, "-m", "tests.kernels"]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._asking = threading.Lock()  # jupyter_client may ask from a thread of its own
        self.ask()  # it is there

    def ask(self, **words: Any) -> int | None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._asking:
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()
            answer: int | None = json.loads(self._process.stdout.readline())
            return answer

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


class Forked:
    """A forked kernel, asked as ``subprocess.Popen`` is."""

    stdin = stdout = stderr = None

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid

    def poll(self) -> int | None:
        return self._server.ask(poll=self.pid)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:  # as Popen: one that has ended hears nothing
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class ForkProvisioner(LocalProvisioner):
    """What jupyter_client starts kernels with."""

    server = traitlets.Instance(ForkServer)

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        arguments = cmd[cmd.index("ipykernel_launcher") :]
        pid = self.server.ask(argv=arguments, cwd=kwargs["cwd"], environ=kwargs["env"])
        assert pid is not None
        self.process, self.pid, self.pgid = Forked(self.server, pid), pid, pid  # type: ignore[assignment]
        return self.connection_info


# ------------------------------------------------------------------------------------------------------ in that process


def main() -> None:
    import ipykernel.kernelapp
    import torch  # noqa: F401

    codes: dict[int, int | None] = {}

    def reap(_signal: int, _frame: FrameType | None) -> None:
        for pid in [pid for pid, code in codes.items() if code is None]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)

    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        words = json.loads(line)
        answer = codes[words["poll"]] if "poll" in words else None
        if "argv" in words:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
            answer = os.fork()
            if answer == 0:
                _be_a_kernel(ipykernel.kernelapp.IPKernelApp, **words)
            codes[answer] = None
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        print(json.dumps(answer), flush=True)


def _be_a_kernel(app: Any, argv: list[str], cwd: str, environ: dict[str, str]) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv, sys.path[:1] = [*argv, f"--IPKernelApp.parent_handle={os.getppid()}"], []
    app.launch_instance()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    os._exit(0)  # as a process ends, but for taking torch apart, which would cost half a second of a core


if __name__ == "__main__":
    main()
