"""When a rank wrote its output: a small index file per rank, written by the flusher (format: ``protocol/times``)."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ...protocol.times import ERR, RECORD

PERIOD = 0.1
"""Shortest time in seconds between two records of one stream, and largest delay of a record after a write."""

REPEAT = 64
"""After so many records of one stream, the record of the other is repeated. This bounds a reader's search."""


class Times:
    """A ``Source`` of the flusher. Never raises: on a full disk the times of some lines are lost."""

    def __init__(self, path: Path, out: Path, err: Path) -> None:
        self.deadline: float | None = None
        self._logs = (out, err)
        self._known = [0, 0]
        self._since = [0, 0]
        self._next = 0.0
        self._end = 0
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._end = os.fstat(self._fd).st_size // RECORD.size * RECORD.size
            os.ftruncate(self._fd, self._end)  # a partial record of an earlier writer
        except OSError:
            self._stop()
        os.register_at_fork(after_in_child=self._stop)

    def written(self) -> None:
        """Output was written; record it at the next deadline."""
        if self.deadline is None:
            self.deadline = self._next

    def flush(self) -> None:
        """Record the files that grew. Includes output of C libraries and child processes."""
        now = time.monotonic()
        if self._fd < 0 or now < self._next:
            return
        self.deadline = None
        self._record()
        self._next = now + PERIOD

    def close(self) -> None:
        """Write the last records."""
        if self._fd >= 0:
            self._record()
            self._stop()

    def _record(self) -> None:
        try:
            t = time.time()
            for stream, path in enumerate(self._logs):
                size = os.stat(path).st_size
                if size != self._known[stream] or self._since[stream] >= REPEAT:
                    self._known[stream] = size
                    self._since[stream] = 0
                    self._since[1 - stream] += 1
                    self._write(RECORD.pack(t, size | (ERR if stream else 0)))
        except (OSError, ValueError):
            return

    def _write(self, record: bytes) -> None:
        if os.write(self._fd, record) != RECORD.size:
            os.ftruncate(self._fd, self._end)  # the disk is full: remove the partial record
        else:
            self._end += RECORD.size

    def _stop(self) -> None:
        """Write no more records. Also called in a forked child, because the file belongs to the parent."""
        fd, self._fd, self.deadline = getattr(self, "_fd", -1), -1, None
        if fd >= 0:
            os.close(fd)
