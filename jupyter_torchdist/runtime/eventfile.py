"""Appending to this process's own ``*.events`` file: one write a line, so no reader sees a torn one."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from ..protocol.events import Event


class EventFile:
    """The events of one process. Never raises for a full disk: a rank must not die of a lost event."""

    def __init__(self, path: Path, rank: int | None = None) -> None:
        self._rank = rank
        self.fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, kind: str, *, rank: int | None = None, **data: Any) -> None:
        event = Event(kind, time.time(), rank=self._rank if rank is None else rank, data=data)
        try:
            os.write(self.fd, event.to_line())
        except OSError:
            return

    def close(self) -> None:
        os.close(self.fd)
