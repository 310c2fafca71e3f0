"""Appending to this process's own ``*.events`` file. Readers take whole lines only."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from ..protocol.events import Event
from ..protocol.reserve import reserve

_KEPT = 64 * 1024
"""Bytes of events that wait for room on a full disk; what comes after them is lost."""

_ROOM = 32 * 1024
"""Bytes that are kept for the events of one process when a job begins: how a rank ended must not be lost."""


class EventFile:
    """The events of one process, whose threads may all write. Never raises for a full disk: what it refuses is written
    with a later event.
    """

    def __init__(self, path: Path, rank: int | None = None) -> None:
        self._rank = rank
        self.fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._unwritten = b""
        self._lock = threading.RLock()  # a signal may come in the middle of a write, and have an event of its own
        reserve(self.fd, _ROOM)

    def write(self, kind: str, *, rank: int | None = None, **data: Any) -> None:
        event = Event(kind, time.time(), rank=self._rank if rank is None else rank, data=data)
        with self._lock:
            if len(self._unwritten) < _KEPT:
                self._unwritten += event.to_line()
            self.flush()

    def flush(self) -> None:
        """Try again what could not be written."""
        try:
            with self._lock:
                while self._unwritten:
                    self._unwritten = self._unwritten[os.write(self.fd, self._unwritten) :]
        except OSError:
            return

    def close(self) -> None:
        os.close(self.fd)
