"""Reports the first loss that is NaN, with rank and step, because later training is usually useless."""

from __future__ import annotations

import os
from pathlib import Path

from .eventfile import EventFile


class FirstNaN:
    """Called with each NaN among the losses of a rank. The first rank of a node reports it, once per job.

    Losses are the scalars on which ``backward()`` is called, without the scale of a ``GradScaler``. Never raises.
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
            return  # another rank has reported it, or nothing can be written (the curve shows it)
        where = "" if step is None else f" at step {step}"
        self._events.write("job.note", text=f"{name} is NaN{where} on rank {self._rank} (said once)")
