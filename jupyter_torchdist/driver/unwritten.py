"""The journal as a driver writes it: on a full disk events are kept and tried again, so that the job goes on."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from ..protocol.errors import StoreError
from ..protocol.events import Event
from ..store import journal

PATIENCE_SECONDS = 600.0
"""How long a driver at its end waits for free disk space to write the journal's last lines."""


class Unwritten:
    """Events on their way to ``writer``, which gets many at once: all that nodes have said in one turn."""

    def __init__(self, writer: journal.Writer) -> None:
        self._writer = writer
        self._events: list[Event] = []

    def append(self, event: Event) -> None:
        self._events.append(event)

    def write(self) -> int:
        """Write all of them, or none on a full disk. Returns the number of the journal's last event."""
        if self._events:
            with contextlib.suppress(StoreError):
                self._writer.append(*self._events)
                self._events.clear()
        return self._writer.seq

    def close(self, root: Path) -> None:
        """Keep this process alive until the last line is written, so that no other driver takes up the job.

        ``root``: the job's directory.
        """
        self.write()
        until = time.monotonic() + PATIENCE_SECONDS
        while self._events and root.is_dir() and time.monotonic() < until:
            time.sleep(0.2)
            self.write()
        self._writer.close()
