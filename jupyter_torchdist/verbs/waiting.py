"""Waiting for a job while an interrupt may come at any instruction.

The first interrupt asks every rank to stop (KeyboardInterrupt), the second kills, the third only stops waiting.
So does SIGTERM, SIGHUP or SIGQUIT where they are waited for, but that ranks get SIGTERM, as from torchrun.
While a job is under way SIGINT is counted, never raised: nothing between the job's start and its end can be torn.
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
"""Seconds between two polls: a quarter of the time since the job last changed, within these limits."""
SHARE = 9
"""A poll that took long is followed by a pause this many times as long, so that waiting costs a tenth of a core."""
LONGEST_PAUSE = 0.05
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""What Slurm, Kubernetes, ``timeout`` and a terminal that closes send to a program that is to end."""
ECHO = 1.0
"""Seconds within which another of ``ENDING`` is the same one: ``timeout`` signals its child, then the child's group."""
FOLLOWS = 0.3
"""Seconds within which a kernel's interrupt is followed by its shut-down, where Jupyter means that."""


class Waitable(Protocol):
    """What waiting needs of a job."""

    @property
    def state(self) -> JobState: ...

    def interrupt(self) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def revive(self) -> None: ...


class Ended(KeyboardInterrupt):
    """One of ``ENDING`` came before there was a job."""


class Interrupts:
    """Takes SIGINT, and the signals ``ending``, over in the main thread, for the length of a ``with`` block.

    Until ``hold`` is called an interrupt raises ``KeyboardInterrupt`` as ever; from then on it is only counted,
    until ``release``. In another thread, where Python runs no handlers, it changes nothing.
    """

    def __init__(self, ending: Sequence[signal.Signals] = ()) -> None:
        self.count = 0
        self.ended_by: signal.Signals | None = None
        """The first of ``ending`` that came."""
        self._heard = float("-inf")
        self._held = False
        self._ending = ending
        self._previous: dict[int, Any] = {}

    def hold(self) -> None:
        """From here on interrupts are counted."""
        self._held = True

    def release(self) -> None:
        """From here on interrupts raise again; those counted are not made up for."""
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
    """The final state, or the last one seen when the person who waits gave up: by the third interrupt, or
    under ``detach`` by the first, which then asks nothing of the job.

    ``closing``: whether this kernel is being shut down or restarted, which leaves the job alone; Jupyter begins it
    with an interrupt.
    ``tick`` is called with every state polled, the final one included, from this thread. Raises ``JobLost`` and
    ``LaunchError`` when the job's driver is dead and cannot be replaced, ``StoreError`` when it cannot be asked.
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
    """Whether the first interrupt was the beginning of a shut-down; a second one is a person's."""
    until = time.monotonic() + FOLLOWS
    while not closing():
        if interrupts.count > 1 or time.monotonic() > until:
            return False
        time.sleep(SHORTEST_PAUSE)
    return True


def _pause(quiet: float, spent: float) -> float:
    return max(SHORTEST_PAUSE, min(quiet / 4, PAUSE), min(spent * SHARE, LONGEST_PAUSE))
