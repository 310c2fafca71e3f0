"""Makes a forked process like a new one: signals, files, random numbers, ``__main__``."""

from __future__ import annotations

import atexit
import builtins
import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import time
import weakref
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from ..protocol.plan import Plan
from ..protocol.process import STACKS_SIGNAL, ProcessId
from ..protocol.spec import STDIN
from .streams.flusher import Flusher
from .streams.output import UNINTERRUPTIBLE


class RankInterrupts:
    """The rank's SIGINT handler. The first signal raises ``KeyboardInterrupt``; ``received`` is set, which
    distinguishes it from a ``KeyboardInterrupt`` that user code raises.
    A ``Source`` of the flusher, which sends the signal again if it came during code that must not be interrupted.
    """

    def __init__(self, flusher: Flusher) -> None:
        self.received: float | None = None
        self.deadline: float | None = None
        self._armed = True
        self._flusher = flusher
        flusher.add(self)
        signal.signal(signal.SIGINT, self._on_signal)

    @property
    def heard(self) -> bool:
        """Whether user code got the exception, or has ended. False while the signal waits for the end of a write."""
        return self.received is not None and not self._armed

    def disarm(self) -> None:
        """User code has ended: from now on a signal is recorded but has no effect."""
        self._armed = False

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.received = self.received or time.time()
        if not self._armed:
            return
        if frame is not None and frame.f_code is UNINTERRUPTIBLE:
            self.deadline = time.monotonic() + 0.001
            self._flusher.wake()
            return
        self._armed = False
        signal.default_int_handler(signum, frame)

    def flush(self) -> None:
        if self.deadline is not None:
            self.deadline = None
            os.kill(os.getpid(), signal.SIGINT)


def started() -> dict[str, Any]:
    """What a rank says of itself when it has started."""
    local, restarts = int(os.environ["LOCAL_RANK"]), int(os.environ.get("TORCHDIST_RESTARTS", "0"))
    return {"process": ProcessId.mine().to_json(), "local_rank": local, "restarts": restarts}


def lead_a_session() -> None:
    """Start a new session, as ranks of torchrun do. Linux shares CPU time among sessions first (sched(7), *autogroup*).

    In the session of the launcher, all ranks together would get the CPU share of one session, and wait longer for each
    other: a pipeline on 2 busy CPUs took 8 % more time per step.
    """
    if os.getsid(0) != os.getpid():
        os.setsid()


def default_signals(stacks: Path) -> None:
    """Remove torch elastic's handlers, which raise an ``Exception``. Write stacks on a crash and on SIGUSR1."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable(2)
    show_stacks_in(stacks)


def show_stacks_in(stacks: Path) -> None:
    """Write all stacks to ``stacks`` at our signal and SIGUSR1, even if user code has set its own handler."""
    dumps = os.open(stacks, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for number in (STACKS_SIGNAL, signal.SIGUSR1):
        faulthandler.register(number, file=dumps, all_threads=True)


def prepare(plan: Plan, rank: int, program: bool) -> None:
    """Make the process what a rank's is, before it chooses a device."""
    _as_torchrun(plan, rank, program)
    _forget_the_parent()
    _plain_drawing()
    _use_threads()


def _forget_the_parent() -> None:
    """Remove what a forked process inherits, unlike a new interpreter: exit handlers, a process name, seeds.

    ``random`` seeds itself again after a fork. torch's CPU generator gets a random seed at the import of torch. The GPU
    generators begin with the same constant in every process.
    """
    if multiprocessing.parent_process() is None:
        return
    atexit._clear()
    atexit.register(logging.shutdown)
    finalize: Any = weakref.finalize
    finalize._registry.clear()
    finalize._registered_with_atexit = False
    process: Any = multiprocessing.current_process()
    process.name, process._identity = "MainProcess", ()
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def _as_torchrun(plan: Plan, rank: int, program: bool) -> None:
    """Set what torchrun sets: the count of restarts, the virtual local rank; for a program also its standard input.

    A pipe or a terminal is one for all ranks. A file is read by each rank from its beginning.
    """
    count = os.environ.pop("TORCHDIST_RESTARTS", "0")
    os.environ.update(TORCHELASTIC_RESTART_COUNT=count, TORCHELASTIC_MAX_RESTARTS=str(plan.restarts))
    if plan.virtual_local_rank:
        os.environ["LOCAL_RANK"] = "0"
        if gpu := plan.gpu_of_rank().get(rank):
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    path = os.environ.pop(STDIN, "")
    if program and path:
        try:
            opened = os.open(path, os.O_RDONLY | os.O_NOCTTY)
        except OSError:  # it is closed, a socket, or its process has ended
            return
        os.dup2(opened, 0)
        os.close(opened)


def _use_threads() -> None:
    """Apply ``OMP_NUM_THREADS``: torch has read it at its import, in another environment."""
    if count := os.environ.get("OMP_NUM_THREADS", ""):
        import torch

        first = count.split(",")[0].strip()
        if first.isdigit() and int(first) > 0:
            torch.set_num_threads(int(first))


def _plain_drawing() -> None:
    """Replace notebook backends of matplotlib by Agg, because they need a kernel."""
    chosen = os.environ.get("MPLBACKEND", "Agg").lower()
    if chosen.startswith("module://") or chosen in ("nbagg", "notebook", "widget", "inline", "ipympl"):
        chosen = "agg"
    os.environ["MPLBACKEND"] = "Agg" if chosen == "agg" else chosen


def new_main() -> ModuleType:
    """Install an empty ``__main__``, as in an interactive interpreter: no file, no spec."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    _old_mains.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    sys.argv = [""]
    return main


_old_mains: list[ModuleType] = []
"""Keeps earlier modules alive: a module without references loses its names, but its functions may still run."""
