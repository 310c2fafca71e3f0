"""A warm process: torch is imported, and a launcher is one fork away.

It imports a tested allow-list, runs no tensor operation and opens no GPU: a matmul before the fork and the
child's matmul hangs for ever. After each import its threads are held against the known fork-safe ones; a
library that starts more is left to the ranks from then on.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import sys
import time
from typing import Any

from ..protocol.channel import Channel
from ..protocol.errors import ChannelError
from ..protocol.process import start_ticks
from . import launcher
from .assignment import Assignment

PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.launcher.api",
    "torch.distributed.elastic.multiprocessing",
    "torch.distributed.elastic.rendezvous",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "cloudpickle",
    "jupyter_torchdist.runtime.rendezvous",
    "jupyter_torchdist.runtime.worker",
)
"""What every rank needs, before the first job is taken."""

PRELOAD_LATER = ("torch._dynamo",)
"""What most ranks need (an optimizer imports it): loaded while idle, as it takes seconds."""

FORK_SAFE_THREADS = 1
"""OS threads beside the main one after the imports: OpenBLAS's, which stops and restarts them around a fork."""


def threads() -> int:
    """OS threads of this process."""
    return len(os.listdir("/proc/self/task"))


class ForkUnsafe(Exception):
    """An import started a thread that a fork would lose."""


def preload(names: tuple[str, ...]) -> list[str]:
    """Import ``names``; those that are not installed are passed over. Raises ``ForkUnsafe``."""
    done = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        if threads() > FORK_SAFE_THREADS + 1:
            raise ForkUnsafe(name)
        done.append(name)
    return done


def main(fd: int) -> None:
    """Serve fork requests on the socket ``fd`` until the agent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    channel = Channel(fd, fd)
    try:
        channel.send({"type": "ready", "preloaded": preload(PRELOAD)})
    except ForkUnsafe as unsafe:
        channel.send({"type": "unsafe", "library": str(unsafe)})
        return
    gc.collect()
    gc.freeze()
    with contextlib.suppress(EOFError, ChannelError):
        _serve(channel, wake_read, wake_write)


def _serve(channel: Channel, wake_read: int, wake_write: int) -> None:
    later = list(PRELOAD_LATER)
    with selectors.DefaultSelector() as selector:
        selector.register(channel.read_fd, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        while True:
            ready = selector.select(0 if later else None)
            if not ready and later:
                _load_idle(channel, later)
                continue
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
            _reap(channel)
            for message, _ in channel.receive():
                if message["type"] == "fork":
                    _fork(channel, selector, (wake_read, wake_write), message)


def _load_idle(channel: Channel, later: list[str]) -> None:
    """Import one more library; when it is not fork-safe this zygote is spoilt and says so."""
    name = later.pop(0)
    try:
        preload((name,))
    except ForkUnsafe:
        channel.send({"type": "unsafe", "library": name})
        raise EOFError from None
    gc.collect()
    gc.freeze()
    if not later:
        channel.send({"type": "warm"})


def _fork(channel: Channel, selector: selectors.BaseSelector, wakers: tuple[int, int], message: dict[str, Any]) -> None:
    assignment = Assignment.from_json(message["assignment"])
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        selector.close()
        channel.close()
        for fd in wakers:
            os.close(fd)
        launcher.start(assignment)
    channel.send(
        {
            "type": "forked",
            "job": assignment.job,
            "attempt": assignment.attempt,
            "pid": pid,
            "ticks": start_ticks(pid),
            "seconds": time.monotonic() - began,
        }
    )


def _reap(channel: Channel) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        channel.send({"type": "exited", "pid": pid, "code": os.waitstatus_to_exitcode(status)})


if __name__ == "__main__":
    main(int(sys.argv[1]))
