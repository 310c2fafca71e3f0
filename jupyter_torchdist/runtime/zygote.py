"""A warm process: torch is imported, and a launcher is one fork away.

It imports a tested allow-list, runs no tensor operation and opens no GPU: a matmul before the fork and the
child's matmul hangs for ever. After each import its threads are held against the known fork-safe ones; a
library that starts more is left to the ranks from then on.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import signal
from collections.abc import Container
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
"""What many ranks need (an optimizer imports the first): it takes seconds, so a fork of the zygote loads it and
then takes the zygote's place; no job waits for it. pandas, SciPy and scikit-learn are fork-safe too, but their
pages make every fork a quarter slower."""

OPENBLAS = ("numpy",)
"""Imports whose threads are OpenBLAS's, which stops and restarts them around a fork (pthread_atfork)."""


def threads() -> int:
    """OS threads of this process."""
    return len(os.listdir("/proc/self/task"))


PR_SET_PDEATHSIG = 1


class ForkUnsafe(Exception):
    """An import started a thread that a fork would lose."""


def preload(names: tuple[str, ...], unsafe: Container[str] = ()) -> list[str]:
    """Import ``names`` but for ``unsafe``; those that are not installed are passed over. Raises ``ForkUnsafe``."""
    done = []
    for name in names:
        if name in unsafe:
            continue
        before = threads()
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001  # an installation that is broken is for the job that needs it to report
            continue
        if threads() > before and name not in OPENBLAS:
            raise ForkUnsafe(name)
        done.append(name)
    gc.collect()
    gc.freeze()  # keeps the collector from writing to, and so copying, pages shared with the ranks
    return done


def die_with_parent(yes: bool) -> None:
    """Whether the parent's death ends this process at once (prctl(2)); a channel's end is seen only between imports."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL) if yes else 0, 0, 0, 0)


def main(fd: int, unsafe: Container[str] = ()) -> None:
    """Serve fork requests on the socket ``fd`` until the agent is gone; ``unsafe`` are libraries not to import."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(True)
    channel = Channel(fd, fd)
    with contextlib.suppress(EOFError, ChannelError):
        try:
            done = preload(PRELOAD, unsafe)
        except ForkUnsafe as library:
            channel.send({"type": "unsafe", "library": str(library)})
            return
        channel.send({"type": "ready", "pid": os.getpid(), "preloaded": done})
        _serve(channel, _Successor(channel, unsafe))


class _Successor:
    """A fork of this zygote that imports more and says when it could take over."""

    def __init__(self, channel: Channel, unsafe: Container[str]) -> None:
        self.read_fd, write_fd = os.pipe()
        go_read, self._go_write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.read_fd)
            os.close(self._go_write)
            self._prepare(channel, unsafe, write_fd, go_read)
        os.close(write_fd)
        os.close(go_read)

    def _prepare(self, channel: Channel, unsafe: Container[str], write_fd: int, go_fd: int) -> None:
        try:
            die_with_parent(True)
            done = preload(PRELOAD_LATER, unsafe)
            die_with_parent(False)
            os.write(write_fd, b"r")
            os.close(write_fd)
            if os.read(go_fd, 1):
                os.close(go_fd)
                channel.send({"type": "warm", "pid": os.getpid(), "preloaded": done})
                _serve(channel, None)
        except ForkUnsafe as library:
            os.write(write_fd, str(library).encode())
        except (EOFError, ChannelError, BrokenPipeError):
            pass
        finally:
            os._exit(0)

    def says(self) -> str:
        """``r`` when it waits to take over, else the library that it must not import; empty when it died.

        Call when ``read_fd`` is readable.
        """
        return os.read(self.read_fd, 100).decode()

    def take_over(self) -> None:
        os.write(self._go_write, b"g")

    def close(self) -> None:
        for fd in (self.read_fd, self._go_write):
            os.close(fd)


def _serve(channel: Channel, successor: _Successor | None) -> bool:
    """Fork launchers until the agent is gone (``EOFError``); True once the successor has taken over."""
    with selectors.DefaultSelector() as selector:
        selector.register(channel.read_fd, selectors.EVENT_READ)
        if successor is not None:
            selector.register(successor.read_fd, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            _reap()
            if channel.read_fd in ready:
                for message, _ in channel.receive():
                    if message["type"] == "fork":
                        _fork(channel, successor, message)
            if successor is not None and successor.read_fd in ready and channel.between_frames:
                said = successor.says()
                if said == "r":
                    successor.take_over()
                    return True
                if said:
                    channel.send({"type": "unsafe", "library": said})
                selector.unregister(successor.read_fd)
                successor.close()
                successor = None


def _fork(channel: Channel, successor: _Successor | None, message: dict[str, Any]) -> None:
    assignment = Assignment.from_json(message["assignment"])
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        channel.close()
        if successor is not None:
            successor.close()
        launcher.start(assignment)
    channel.send({"type": "forked", "job": assignment.job, "pid": pid, "ticks": start_ticks(pid)})


def _reap() -> None:
    """Launchers that ended; each wrote down its outcome itself."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
