"""Waiting for a job while an interrupt may come at any instruction.

The first interrupt asks every rank to stop (KeyboardInterrupt), the second kills the ranks, the third ends the wait.
SIGTERM, SIGHUP and SIGQUIT do the same where they are handled, but ranks first get SIGTERM, as from torchrun.
From a job's start to its end SIGINT is counted and never raised, so it cannot interrupt our code half-way.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Protocol

from ..protocol.state import JobState

SHORTEST_PAUSE, PAUSE = 0.002, 0.02
"""Seconds between two polls: a quarter of the time since the job's last change, within these limits."""
SHARE = 9
"""After a slow poll the pause is this many times as long as the poll, so that waiting costs a tenth of a core."""
LONGEST_PAUSE = 0.05
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that Slurm, Kubernetes, ``timeout`` and a closing terminal send to a program that must end."""
ECHO = 1.0
"""Signals of ``ENDING`` within so many seconds count once: ``timeout`` signals its child, then the child's group."""
FOLLOWS = 0.3
"""To shut a kernel down, Jupyter interrupts it first; the shut-down follows within so many seconds."""


class Waitable(Protocol):
    """The part of a job's interface that waiting needs."""

    @property
    def state(self) -> JobState: ...

    def interrupt(self) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def revive(self) -> None: ...


class Ended(KeyboardInterrupt):
    """A signal of ``ENDING`` came before there was a job."""


class Interrupts:
    """Handles SIGINT and the signals ``ending`` in the main thread, for the length of a ``with`` block.

    Before ``hold`` an interrupt raises ``KeyboardInterrupt`` as usual. Between ``hold`` and ``release`` interrupts are
    only counted. In other threads, where Python runs no signal handlers, this class changes nothing.
    """

    def __init__(self, ending: Sequence[signal.Signals] = ()) -> None:
        self.count = 0
        self.ended_by: signal.Signals | None = None
        """The first signal of ``ending`` that came."""
        self._heard = float("-inf")
        self._held = False
        self._ending = ending
        self._previous: dict[int, Any] = {}

    def hold(self) -> None:
        """From here on interrupts are counted."""
        self._held = True

    def release(self) -> None:
        """From here on interrupts raise again; counted interrupts are not raised later."""
        self._held = False

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if not self._held:
            raise KeyboardInterrupt
        self.count += 1

    def _on_end(self, number: int, _frame: FrameType | None) -> None:
        if not self._held:
            raise Ended
        heard, self._heard = self._heard, time.monotonic()
        if self._heard - heard > ECHO:
            self.ended_by = self.ended_by or signal.Signals(number)
            self.count += 1

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._on_signal)
            for number in self._ending:
                if signal.getsignal(number) is not signal.SIG_IGN:  # ``nohup`` ignores SIGHUP
                    self._previous[number] = signal.signal(number, self._on_end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            # None: a handler that C code set; it cannot be set back from here.
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual if previous is None else previous)


def wait(
    job: Waitable,
    interrupts: Interrupts,
    tick: Callable[[JobState], None],
    *,
    detach: bool = False,
    closing: Callable[[], bool] | None = None,
) -> JobState:
    """Wait for the job's end and return its final state, or the last state when the user gives up.

    The third interrupt gives up; with ``detach`` the first one does, without a request to the job.
    ``closing``: whether this kernel is shutting down or restarting, which does not stop the job. Jupyter first sends
    an interrupt then. ``tick`` is called in this thread with every polled state, the final one included.
    Raises ``JobLost`` and ``LaunchError`` when the job's driver is dead and cannot be replaced, and ``StoreError``
    when a request cannot be written.
    """
    answered = 0
    changed, seen = time.monotonic(), -1
    while True:
        try:
            polled = time.monotonic()
            state = job.state
            if state.seq != seen:
                changed, seen = polled, state.seq
            tick(state)
            if state.final or interrupts.count >= (1 if detach else 3):
                return state
            if interrupts.count > answered:
                if answered == 0 and closing and _follows(closing, interrupts):
                    return state
                answered = interrupts.count
                _ask(job, interrupts)
            job.revive()
            time.sleep(_pause(polled - changed, time.monotonic() - polled))
        except KeyboardInterrupt:  # in a thread without our handler
            interrupts.count += 1


def _ask(job: Waitable, interrupts: Interrupts) -> None:
    if interrupts.count > 1:
        job.kill()
    elif interrupts.ended_by is not None:
        job.terminate()
    else:
        job.interrupt()


def _follows(closing: Callable[[], bool], interrupts: Interrupts) -> bool:
    """Whether a shut-down follows the first interrupt. A second interrupt comes from the user."""
    until = time.monotonic() + FOLLOWS
    while not closing():
        if interrupts.count > 1 or time.monotonic() > until:
            return False
        time.sleep(SHORTEST_PAUSE)
    return True


def _pause(quiet: float, spent: float) -> float:
    return max(SHORTEST_PAUSE, min(quiet / 4, PAUSE), min(spent * SHARE, LONGEST_PAUSE))
