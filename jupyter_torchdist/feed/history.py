"""Lines that a view does not hold: lines before its oldest line, and lines around an offset."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..protocol.feed import LINE_LIMIT, Around, Older
from ..store import segments
from ..store.segments import Log, Segment
from ..store.tail import line_after

MOST = 1024 * 1024
"""Largest number of bytes of text in one answer."""

_WINDOW = 64 * 1024


@dataclass
class BackReader:
    """One file, read backwards from ``position``."""

    log: Log
    position: int
    ready: list[Segment] = field(default_factory=list)

    def last(self) -> Segment | None:
        """The segment before ``position``; None at the beginning of the file."""
        if not self.ready and self.position > 0:
            self.ready = self._before(self.position)
        return self.ready[-1] if self.ready else None

    def take(self) -> Segment:
        segment = self.ready.pop()
        self.position = segment.start
        return segment

    def _before(self, end: int) -> list[Segment]:
        start = max(0, end - _WINDOW)
        data = self.log.read(start, end)
        if start > 0 and data:
            # ``data`` may begin inside a line. The line belongs to the next window, unless it fills this window.
            newline = data.find(b"\n", 0, len(data) - 1)
            skip = newline + 1 if newline >= 0 else segments.from_character(data)
            start, data = start + skip, data[skip:]
        return self.log.segments(start, data, rest=True)


def older(logs: dict[str, Log], at: dict[str, int], names: list[str], limit: int) -> Older:
    """The ``limit`` bytes before ``at``, merged by time. A file that is not in ``at`` is read from its end."""
    limit = min(max(limit, 1), MOST)
    readers = {
        name: BackReader(log, min(max(0, at.get(name, log.size())), log.size()))
        for name, log in logs.items()
        if not names or name in names
    }
    taken: list[Segment] = []
    room = limit
    while room > 0:
        latest = [reader for reader in readers.values() if reader.last() is not None]
        if not latest:
            break
        reader = max(latest, key=lambda reader: (reader.ready[-1].t or 0.0, reader.position))
        taken.append(reader.take())
        room -= len(taken[-1].data)
    return {
        "segments": [segment.to_json() for segment in reversed(taken)],
        "at": {name: reader.position for name, reader in readers.items()},
    }


def around(log: Log, offset: int, limit: int) -> Around:
    """Segments of one file around ``offset``, about ``limit`` bytes."""
    limit = min(max(limit, 1024), MOST)
    size = log.size()
    middle = min(max(0, offset), size)
    start = line_after(log, max(0, min(middle, size - limit // 2) - limit // 2))
    if start > middle:  # a long line: begin with the piece at the offset
        start = middle + segments.from_character(log.read(middle, middle + 4))
    data = log.read(start, start + limit + LINE_LIMIT)
    found, room = [], limit
    for segment in log.segments(start, data, rest=start + len(data) >= size):
        if room <= 0 and segment.start > middle:
            break
        found.append(segment.to_json())
        room -= len(segment.data)
    return {"segments": found}
