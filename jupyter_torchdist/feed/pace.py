"""How much of a processor the curves of a running job may take: the job's own notebook needs it more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

SHARE = 0.04
"""Of the time that passes."""

AT_ONCE = 0.4
"""Seconds of the processor that a view which has rested may take as fast as it can."""

WRITING = 3e-6
"""Seconds that a point of an answer costs whoever sends it."""


class Pace:
    """One view's allowance. Used by one thread at a time."""

    def __init__(self) -> None:
        self._left, self._refilled = AT_ONCE, time.monotonic()

    @property
    def open(self) -> bool:
        """Whether there is anything left."""
        now = time.monotonic()
        self._left = min(AT_ONCE, self._left + (now - self._refilled) * SHARE)
        self._refilled = now
        return self._left > 0

    def spend(self, points: int) -> None:
        """For an answer of so many points."""
        self._left -= points * WRITING

    @contextmanager
    def spending(self, counted: bool) -> Iterator[None]:
        """Around work of this thread that counts, or does not."""
        begun = time.thread_time()
        try:
            yield
        finally:
            if counted:
                self._left -= time.thread_time() - begun
