"""Appends to this process's own ``*.events`` file. Readers use only complete lines."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from ..protocol.disk import reserve
from ..protocol.events import Event

_KEPT = 64 * 1024
"""Largest size in bytes of events that wait for free space on a full disk; later events are lost."""

_ROOM = 32 * 1024
"""Bytes reserved on the disk for the events of one process: the event with the end of a rank must not be lost."""


class EventFile:
    """Writes the events of one process; thread-safe. Does not raise when the disk is full: the event is then written
    together with a later one.
    """

    def __init__(self, path: Path, rank: int | None = None) -> None:
        self._rank = rank
        self.fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._unwritten = b""
        self._lock = threading.RLock()  # a signal handler may write an event during a write
        reserve(self.fd, _ROOM)

    def write(self, kind: str, *, rank: int | None = None, **data: Any) -> None:
        event = Event(kind, time.time(), rank=self._rank if rank is None else rank, data=data)
        with self._lock:
            if len(self._unwritten) < _KEPT:
                self._unwritten += event.to_line()
            self.flush()

    def flush(self) -> None:
        """Try again to write the events that could not be written."""
        try:
            with self._lock:
                while self._unwritten:
                    self._unwritten = self._unwritten[os.write(self.fd, self._unwritten) :]
        except OSError:
            return

    def close(self) -> None:
        os.close(self.fd)
