"""New output of the ranks, merged by time, read only as fast as its reader takes it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..protocol.feed import FIRST_BYTES, LINE_LIMIT
from . import segments
from .segments import Log, Segment

LAG = 4 * 1024 * 1024
"""Bytes of all files together that a view may be behind. Older output is skipped."""

LEAST = 16 * 1024
"""Bytes of each file that are never skipped."""

WINDOW = 64 * 1024 + LINE_LIMIT
"""Bytes of one file that are read at a time: larger than the longest piece of a line."""

PATIENCE = 0.25
"""Seconds after which a line without a newline (a progress bar, a prompt) is shown."""


@dataclass
class Reader:
    """One file, read forward. ``position``: offset after the last segment that was taken."""

    log: Log
    position: int
    patience: float
    ready: deque[Segment] = field(default_factory=deque)
    _read: int = 0
    _waiting: float | None = None

    def __post_init__(self) -> None:
        self._read = self.position

    def fill(self, size: int, now: float, ended: bool) -> None:
        """Prepare segments of new bytes. A line without a newline waits for ``patience`` seconds."""
        if self.ready or size <= self._read:
            return
        data = self.log.read(self._read, min(size, self._read + WINDOW))
        found = self.log.segments(self._read, data)
        if not found and data:
            found = self._rest(data, now, ended)
        if found:
            self._waiting = None
            self._read = found[-1].end
            self.ready.extend(found)

    def _rest(self, data: bytes, now: float, ended: bool) -> list[Segment]:
        if self._waiting is None:
            self._waiting = now
        if not ended and now - self._waiting < self.patience:
            return []
        whole = data if ended else data[: len(data) - segments.unfinished(data)]
        return self.log.segments(self._read, whole, rest=True)

    def take(self) -> Segment:
        segment = self.ready.popleft()
        self.position = segment.end
        return segment

    def skip_to(self, offset: int) -> None:
        """Continue at the first line that begins at or after ``offset``."""
        self.ready.clear()
        self._waiting = None
        self.position = self._read = line_after(self.log, offset)


def line_after(log: Log, offset: int) -> int:
    """Offset of the first line at or after ``offset``; inside a very long line, about ``offset`` itself."""
    if offset <= 0:
        return 0
    data = log.read(offset - 1, offset + LINE_LIMIT)
    newline = data.find(b"\n")
    if newline >= 0:
        return offset + newline
    return offset + segments.from_character(data[1:5])


class Tail:
    """All log files of a job.

    ``have``: how many bytes of each file the reader already has. Other files that exist at the first poll begin with
    their last ``first`` bytes (None: with the first byte). If the reader is more than ``lag`` bytes behind, output is
    skipped. A line without a newline is shown after ``patience`` seconds.
    """

    def __init__(
        self,
        have: dict[str, int],
        first: int | None = FIRST_BYTES,
        lag: float = LAG,
        patience: float = PATIENCE,
    ) -> None:
        self._have, self._begin, self._lag, self._patience = have, first, lag, patience
        self._first = True
        self._readers: dict[str, Reader] = {}

    def poll(self, logs: dict[str, Log], sizes: dict[str, int], now: float, limit: int, ended: bool) -> list[Segment]:
        """New segments of about ``limit`` bytes in all, the oldest first. ``ended``: the job writes no more output."""
        self._meet(logs, sizes)
        self._catch_up(sizes)
        for reader in self._readers.values():
            reader.fill(sizes.get(reader.log.name, 0), now, ended)
        taken: list[Segment] = []
        room = limit
        while room > 0:
            oldest = self._oldest()
            if oldest is None or (taken and len(oldest.ready[0].data) > room):
                break
            taken.append(oldest.take())
            room -= len(taken[-1].data)
            if not oldest.ready:
                oldest.fill(sizes.get(oldest.log.name, 0), now, ended)
        return taken

    def behind(self, sizes: dict[str, int]) -> int:
        """Number of bytes that are written but not yet taken."""
        return sum(max(0, sizes.get(name, 0) - reader.position) for name, reader in self._readers.items())

    def _oldest(self) -> Reader | None:
        ready = [reader for reader in self._readers.values() if reader.ready]
        return min(ready, key=lambda reader: reader.ready[0].t or 0.0, default=None)

    def _meet(self, logs: dict[str, Log], sizes: dict[str, int]) -> None:
        for name, log in logs.items():
            if name in self._readers:
                continue
            size = sizes.get(name, 0)
            reader = self._readers[name] = Reader(log, 0, self._patience)
            if name in self._have:
                reader.position = reader._read = min(max(0, self._have[name]), size)
            elif self._first and self._begin is not None and size > self._begin:
                reader.skip_to(size - self._begin)
        self._first = False

    def _catch_up(self, sizes: dict[str, int]) -> None:
        """Skip output if the reader is too far behind."""
        behind = {name: sizes.get(name, 0) - reader.position for name, reader in self._readers.items()}
        if sum(behind.values()) <= self._lag:
            return
        share = max(LEAST, LAG // max(1, sum(amount > 0 for amount in behind.values())))
        for name, amount in behind.items():
            if amount > share:
                self._readers[name].skip_to(sizes[name] - share // 2)
