"""Says when a job begins to prove its first steps, and when it has: they are slower than the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType


class Proving:
    """A context that may be entered inside itself. ``say`` hears 0 at the first entry of a job, then its seconds."""

    def __init__(self, say: Callable[[float], None]) -> None:
        self._say = say
        self._depth, self._began, self._told = 0, 0.0, False

    def __enter__(self) -> None:
        if self._depth == 0 and not self._told:
            self._began = time.monotonic()
            self._say(0.0)
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth == 0 and not self._told:
            self._told = True
            self._say(max(time.monotonic() - self._began, 0.001))
