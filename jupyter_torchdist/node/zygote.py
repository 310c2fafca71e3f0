"""A warm process (zygote): torch is already imported, and a fork of it becomes a launcher.

It imports a tested allow-list (pandas, SciPy and scikit-learn only if the notebook has them). It runs no tensor
operation and opens no GPU: after a matmul before the fork, the child's matmul hangs forever. After each import it
counts its threads. A library that started threads not known as fork-safe is imported only by ranks from then on.
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

from ..protocol.errors import ChannelError
from ..protocol.process import start_ticks
from ..protocol.wire.assignment import Assignment
from ..protocol.wire.channel import Channel
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
"""Modules that every rank needs; imported before the first job is accepted."""

PRELOAD_LATER = ("torch._dynamo", "jupyter_torchdist.strategies.auto")
"""Modules that many ranks need (an optimizer imports the first, a strategy both). They take seconds to import, so a
fork of the zygote imports them and then replaces the zygote; no job waits. Libraries of jobs follow in the same way."""

OPENBLAS = ("numpy", "scipy.linalg")
"""Modules that start OpenBLAS threads at import. OpenBLAS stops and restarts them around a fork (pthread_atfork)."""

SUCCESSORS = "TORCHDIST_SUCCESSORS"
"""``0`` in the environment of a kernel: its zygote forks no successor, and imports only ``PRELOAD``. This saves two
thirds of the work of a cold start when few jobs follow, as in tests that kill zygotes."""

IMPORTED_BY = {"scipy": "scipy.linalg", "sklearn": "scipy.linalg"}
"""By package: a module to import first, so that threads are attributed to the module that starts them."""

SETTLING_SECONDS = 1.0
"""Delay from the start, or from a job's fork, to imports for later jobs: by then the job's ranks have started."""


def threads() -> int:
    """Number of OS threads of this process."""
    return len(os.listdir("/proc/self/task"))


PR_SET_PDEATHSIG = 1


class ForkUnsafe(Exception):
    """An import started a thread that would not exist in a forked process."""


def preload(names: tuple[str, ...], unsafe: Container[str] = ()) -> list[str]:
    """Import ``names`` except ``unsafe``; skip modules that are not installed. Raises ``ForkUnsafe``."""
    done: dict[str, None] = {}
    gc.disable()  # what an import makes is kept: looking through it takes an eighth of the time of importing torch
    try:
        for name in names:
            package = name.partition(".")[0]
            if name in unsafe or package in unsafe:
                continue
            for part in filter(None, (IMPORTED_BY.get(package), name)):
                if _import(part):
                    done[part] = None
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()  # keeps the collector from writing to (and so copying) pages shared with the ranks
    return list(done)


def _import(name: str) -> bool:
    """Whether the module could be imported. Raises ``ForkUnsafe``."""
    if name in sys.modules:
        return True
    before = threads()
    try:
        importlib.import_module(name)
    except Exception:  # noqa: BLE001  # a broken installation is reported by the job that needs it
        return False
    if threads() > before and name not in OPENBLAS:
        package = name.partition(".")[0]
        raise ForkUnsafe(package if package in LIBRARIES else name)
    return True


def die_with_parent(yes: bool) -> None:
    """Set whether the parent's death kills this process at once (prctl(2)): it reads its channel only after imports."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL) if yes else 0, 0, 0, 0)


def main(fd: int, unsafe: Iterable[str] = ()) -> None:
    """Serve fork requests on the socket ``fd`` until the agent is gone. ``unsafe``: libraries not to import."""
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
        server.prepare_soon(PRELOAD_LATER)
        server.serve()


class _Server:
    """Forks launchers, and sometimes a successor that imports more modules and then replaces this process."""

    def __init__(self, channel: Channel, unsafe: set[str], seen: Iterable[str] = ()) -> None:
        self._channel = channel
        self._unsafe = unsafe
        self._seen = set(seen)
        """Libraries whose import was tried, with or without success."""
        self._wanted: tuple[str, ...] = ()
        self._prepare_at = float("inf")
        self._successor: _Successor | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel.read_fd, selectors.EVENT_READ)

    def prepare_soon(self, names: tuple[str, ...]) -> None:
        """Have a successor import ``names``, unless another one is due or imports."""
        if names and self._successor is None and self._prepare_at == float("inf"):
            self._wanted, self._prepare_at = names, time.monotonic() + SETTLING_SECONDS

    def _prepare(self) -> None:
        """Fork a successor, unless the environment forbids it."""
        names, self._prepare_at = self._wanted, float("inf")
        if os.environ.get(SUCCESSORS) == "0":
            return
        self._seen.update(names)
        self._successor = _Successor(self._channel, self._unsafe, names)
        if self._successor.pid == 0:
            self._selector.close()
            self._successor.be(_Server(self._channel, self._unsafe, self._seen))
        self._selector.register(self._successor.read_fd, selectors.EVENT_READ)

    def serve(self) -> None:
        """Serve until the agent is gone (``EOFError``) or the successor has taken over."""
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
                    self._prepare()
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
            self._seen.difference_update(self._successor.names)  # the next successor tries the others
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
        self.prepare_soon(tuple(name for name in assignment.world.libraries if name not in self._seen))


class _Successor:
    """A fork of the zygote that imports more and reports when it can take over. In the fork, ``pid`` is 0."""

    def __init__(self, channel: Channel, unsafe: set[str], names: tuple[str, ...]) -> None:
        self._channel, self._unsafe, self.names = channel, unsafe, names
        self.read_fd, self._write_fd = os.pipe()
        self._go_read, self._go_write = os.pipe()
        self.pid = os.fork()
        ours, theirs = (self.read_fd, self._go_write), (self._write_fd, self._go_read)
        for fd in ours if self.pid == 0 else theirs:
            os.close(fd)

    def be(self, server: _Server) -> NoReturn:
        """In the fork: import, report it, serve once the zygote has handed over. Never returns."""
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
        """``r`` when it is ready to take over, else the library that it must not import; empty when it died.

        Call it only when ``read_fd`` is readable.
        """
        return os.read(self.read_fd, 100).decode()

    def take_over(self) -> None:
        os.write(self._go_write, b"g")

    def close(self) -> None:
        for fd in (self.read_fd, self._go_write):
            os.close(fd)


def _reap(*_: object) -> None:
    """Reap launchers that have exited; each has recorded its outcome itself."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
