"""A loss that is not a number is said once, with rank and step: what is trained after it is mostly lost."""

from __future__ import annotations

import os
from pathlib import Path

from .eventfile import EventFile


class FirstNaN:
    """Called with each NaN among the losses of a rank; the first of a node's ranks says it, once a job.

    Losses are those on which ``backward()`` is called, without a ``GradScaler``'s scale. Never raises.
    """

    def __init__(self, events: EventFile, mark: Path, rank: int) -> None:
        self._events, self._mark, self._rank, self._said = events, mark, rank, False

    def __call__(self, name: str, step: int | None) -> None:
        if self._said:
            return
        self._said = True
        try:
            os.close(os.open(self._mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        except OSError:
            return  # another rank has said it; or nothing can be written, and the curve shows it
        where = "" if step is None else f" at step {step}"
        self._events.write("job.note", text=f"{name} is NaN{where} on rank {self._rank} (said once)")
