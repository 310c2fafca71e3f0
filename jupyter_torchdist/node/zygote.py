"""A warm process: torch is imported, and a launcher is one fork away.

It imports a tested allow-list (of pandas, SciPy and scikit-learn what the notebook has), runs no tensor operation
and opens no GPU: a matmul before the fork and the child's matmul hangs for ever. After each import its threads are
held against the known fork-safe ones; a library that starts more is left to the ranks from then on.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Container, Iterable
from typing import Any, NoReturn

from ..protocol.assignment import Assignment
from ..protocol.channel import Channel
from ..protocol.errors import ChannelError
from ..protocol.process import start_ticks
from ..protocol.world import LIBRARIES
from . import launcher

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
    "jupyter_torchdist.node.rendezvous",
    "jupyter_torchdist.ranks.worker",
)
"""What every rank needs, before the first job is taken."""

PRELOAD_LATER = ("torch._dynamo", "jupyter_torchdist.strategies.auto")
"""What many ranks need (an optimizer imports the first, a strategy both): it takes seconds, so a fork of the zygote
loads it and then takes the zygote's place; no job waits for it. Libraries that jobs ask for follow in the same way."""

OPENBLAS = ("numpy", "scipy.linalg")
"""Imports whose threads are OpenBLAS's, which stops and restarts them around a fork (pthread_atfork)."""

SUCCESSORS = "TORCHDIST_SUCCESSORS"
"""``0`` in the environment of a kernel: its zygote has none, and imports ``PRELOAD`` alone. Saves two thirds of a cold
start's work where nothing follows, as in tests that kill zygotes."""

IMPORTED_BY = {"scipy": "scipy.linalg", "sklearn": "scipy.linalg"}
"""What parts of a package import first, for its threads to be seen where they come from."""

SETTLING_SECONDS = 1.0
"""From a job's fork to the import of libraries for later jobs: by then its ranks have imported their own."""


def threads() -> int:
    """OS threads of this process."""
    return len(os.listdir("/proc/self/task"))


PR_SET_PDEATHSIG = 1


class ForkUnsafe(Exception):
    """An import started a thread that a fork would lose."""


def preload(names: tuple[str, ...], unsafe: Container[str] = ()) -> list[str]:
    """Import ``names`` but for ``unsafe``; those that are not installed are passed over. Raises ``ForkUnsafe``."""
    done: dict[str, None] = {}
    for name in names:
        package = name.partition(".")[0]
        if name in unsafe or package in unsafe:
            continue
        for part in filter(None, (IMPORTED_BY.get(package), name)):
            if _import(part):
                done[part] = None
    gc.collect()
    gc.freeze()  # keeps the collector from writing to, and so copying, pages shared with the ranks
    return list(done)


def _import(name: str) -> bool:
    """Whether the module could be imported. Raises ``ForkUnsafe``."""
    if name in sys.modules:
        return True
    before = threads()
    try:
        importlib.import_module(name)
    except Exception:  # noqa: BLE001  # an installation that is broken is for the job that needs it to report
        return False
    if threads() > before and name not in OPENBLAS:
        package = name.partition(".")[0]
        raise ForkUnsafe(package if package in LIBRARIES else name)
    return True


def die_with_parent(yes: bool) -> None:
    """Whether the parent's death ends this process at once (prctl(2)); a channel's end is seen only between imports."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL) if yes else 0, 0, 0, 0)


def main(fd: int, unsafe: Iterable[str] = ()) -> None:
    """Serve fork requests on the socket ``fd`` until the agent is gone; ``unsafe`` are libraries not to import."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(True)
    channel = Channel(fd, fd)
    with contextlib.suppress(EOFError, ChannelError):
        try:
            done = preload(PRELOAD, set(unsafe))
        except ForkUnsafe as library:
            channel.send({"type": "unsafe", "library": str(library)})
            return
        channel.send({"type": "ready", "pid": os.getpid(), "preloaded": done})
        server = _Server(channel, set(unsafe))
        server.prepare(PRELOAD_LATER)
        server.serve()


class _Server:
    """Forks launchers, and now and then a successor that imports more and takes over from this process."""

    def __init__(self, channel: Channel, unsafe: set[str], seen: Iterable[str] = ()) -> None:
        self._channel = channel
        self._unsafe = unsafe
        self._seen = set(seen)
        """Libraries that were imported, or could not be."""
        self._wanted: tuple[str, ...] = ()
        self._prepare_at = float("inf")
        self._successor: _Successor | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel.read_fd, selectors.EVENT_READ)

    def prepare(self, names: tuple[str, ...]) -> None:
        """Fork a successor that imports ``names``, unless the environment forbids it."""
        self._prepare_at = float("inf")
        if os.environ.get(SUCCESSORS) == "0":
            return
        self._seen.update(names)
        self._successor = _Successor(self._channel, self._unsafe, names)
        if self._successor.pid == 0:
            self._selector.close()
            self._successor.be(_Server(self._channel, self._unsafe, self._seen))
        self._selector.register(self._successor.read_fd, selectors.EVENT_READ)

    def serve(self) -> None:
        """Until the agent is gone (``EOFError``), or the successor has taken over."""
        signal.signal(signal.SIGCHLD, _reap)
        while True:
            wait = self._prepare_at - time.monotonic()
            ready = {key.fd for key, _ in self._selector.select(None if wait == float("inf") else max(0.0, wait))}
            if self._channel.read_fd in ready:
                for message, _ in self._channel.receive():
                    if message["type"] == "fork":
                        self._fork(message)
            if self._successor is None:
                if time.monotonic() >= self._prepare_at:
                    self.prepare(self._wanted)
            elif self._successor.read_fd in ready and self._channel.between_frames and self._taken_over():
                return

    def _taken_over(self) -> bool:
        assert self._successor is not None
        said = self._successor.says()
        if said == "r":
            self._successor.take_over()
            return True
        if said:
            self._unsafe.add(said)
            self._seen.difference_update(self._successor.names)  # the others are for the next one
            self._channel.send({"type": "unsafe", "library": said})
        self._selector.unregister(self._successor.read_fd)
        self._successor.close()
        self._successor = None
        return False

    def _fork(self, message: dict[str, Any]) -> None:
        assignment = Assignment.from_json(message["assignment"])
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._channel.close()
            if self._successor is not None:
                self._successor.close()
            self._selector.close()
            launcher.start(assignment)
        self._channel.send({"type": "forked", "job": assignment.job, "pid": pid, "ticks": start_ticks(pid)})
        wanted = tuple(name for name in assignment.world.libraries if name not in self._seen)
        if wanted and self._successor is None:
            self._wanted = wanted
            self._prepare_at = min(self._prepare_at, time.monotonic() + SETTLING_SECONDS)


class _Successor:
    """A fork of the zygote that imports more and says when it could take over. In the fork, ``pid`` is 0."""

    def __init__(self, channel: Channel, unsafe: set[str], names: tuple[str, ...]) -> None:
        self._channel, self._unsafe, self.names = channel, unsafe, names
        self.read_fd, self._write_fd = os.pipe()
        self._go_read, self._go_write = os.pipe()
        self.pid = os.fork()
        ours, theirs = (self.read_fd, self._go_write), (self._write_fd, self._go_read)
        for fd in ours if self.pid == 0 else theirs:
            os.close(fd)

    def be(self, server: _Server) -> NoReturn:
        """Import, say so, serve when the zygote has handed over."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a library may start a program and wait for it
        try:
            die_with_parent(True)
            done = preload(self.names, self._unsafe)
            die_with_parent(False)
            os.write(self._write_fd, b"r")
            os.close(self._write_fd)
            if os.read(self._go_read, 1):
                os.close(self._go_read)
                self._channel.send({"type": "warm", "pid": os.getpid(), "preloaded": done})
                server.serve()
        except ForkUnsafe as library:
            os.write(self._write_fd, str(library).encode())
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


def _reap(*_: object) -> None:
    """Launchers that ended; each wrote down its outcome itself."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
