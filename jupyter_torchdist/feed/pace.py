"""Limits the CPU time for curves of a running job, because the job's notebook needs the CPU more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

SHARE = 0.04
"""Allowed CPU time as a share of the elapsed time."""

AT_ONCE = 0.4
"""CPU seconds that an idle view may use at once."""

WRITING = 3e-6
"""CPU seconds that the sender of an answer needs per point."""


class Pace:
    """One view's allowance. Used by one thread at a time."""

    def __init__(self) -> None:
        self._left, self._refilled = AT_ONCE, time.monotonic()

    @property
    def open(self) -> bool:
        """Whether any of the allowance is left."""
        now = time.monotonic()
        self._left = min(AT_ONCE, self._left + (now - self._refilled) * SHARE)
        self._refilled = now
        return self._left > 0

    def spend(self, points: int) -> None:
        """Charge the cost of sending an answer with so many points."""
        self._left -= points * WRITING

    @contextmanager
    def spending(self, counted: bool) -> Iterator[None]:
        """Use around work of this thread. ``counted``: whether its CPU time is charged."""
        begun = time.thread_time()
        try:
            yield
        finally:
            if counted:
                self._left -= time.thread_time() - begun
