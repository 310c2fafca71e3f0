"""Making a forked process what a new one would be: signals, files, random numbers, ``__main__``."""

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

from .streams.flusher import Flusher
from .streams.output import UNINTERRUPTIBLE


class RankInterrupts:
    """The rank's SIGINT: the first raises ``KeyboardInterrupt``, and ``received`` tells it from the user's own.

    A ``Source`` of the flusher, which sends the signal again when it came at a moment that cannot bear it.
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
        """Whether user code got the exception, or is over. One that waits for the end of a write may come too late."""
        return self.received is not None and not self._armed

    def disarm(self) -> None:
        """User code has ended: a signal is noted and changes nothing."""
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


def lead_a_session() -> None:
    """As torchrun's ranks do. Linux shares the processor out among sessions first (sched(7), *autogroup*).

    In the session of their launcher, ranks had together what each has under torchrun, and waited longer for each other:
    a pipeline on 2 busy processors took 8 % more time a step.
    """
    if os.getsid(0) != os.getpid():
        os.setsid()


def default_signals(stacks: Path) -> None:
    """Undo torch elastic's handlers, which raise an ``Exception``; show stacks on a crash and on SIGUSR1."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable(2)
    show_stacks_in(stacks)


def show_stacks_in(stacks: Path) -> None:
    """Write all stacks there at SIGUSR1, whatever user code did with that signal before."""
    dumps = os.open(stacks, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    faulthandler.register(signal.SIGUSR1, file=dumps, all_threads=True)


def forget_the_parent() -> None:
    """What a fork inherits and a new interpreter would not have: exit handlers, a process name, seeds.

    ``random`` seeds itself anew after a fork. torch's generator of the CPU takes a random seed when torch is
    imported; those of GPUs begin with the same constant in every process.
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


def use_threads() -> None:
    """torch read ``OMP_NUM_THREADS`` when it was imported, in another environment."""
    if count := os.environ.get("OMP_NUM_THREADS", ""):
        import torch

        first = count.split(",")[0].strip()
        if first.isdigit() and int(first) > 0:
            torch.set_num_threads(int(first))


def plain_drawing() -> None:
    """Notebook back ends of matplotlib need a kernel."""
    chosen = os.environ.get("MPLBACKEND", "Agg").lower()
    if chosen.startswith("module://") or chosen in ("nbagg", "notebook", "widget", "inline", "ipympl"):
        chosen = "agg"
    os.environ["MPLBACKEND"] = "Agg" if chosen == "agg" else chosen


def new_main() -> ModuleType:
    """An empty ``__main__``, as an interactive interpreter has it: no file, no spec."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    _old_mains.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    sys.argv = [""]
    return main


_old_mains: list[ModuleType] = []
"""A module that nothing refers to loses its names, and its functions may still run."""
