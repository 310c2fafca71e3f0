"""Log files as segments: groups of complete lines, cut where the time changes, and never inside a character."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..protocol import feed
from ..protocol.disk import open_plain, size_of
from ..protocol.feed import LINE_LIMIT
from ..protocol.paths import JobPaths
from . import logs
from .times import Mark, TimeIndex

SPAN = 0.2
"""Seconds of output that one segment may contain. The output of ranks is merged by time with this resolution."""


@dataclass(frozen=True)
class Segment:
    """Bytes ``start`` to ``end`` of a log. ``t``: about when the last byte was written (None: unknown)."""

    log: Log
    start: int
    end: int
    t: float | None
    data: bytes

    def to_json(self) -> feed.Segment:
        text = logs.decode(self.data)
        return {"file": self.log.name, "start": self.start, "end": self.end, "t": self.t, "text": text}


class Log:
    """One stream of one rank, ``RANK.STREAM``."""

    def __init__(self, file: logs.LogFile, paths: JobPaths) -> None:
        self.rank, self.stream, self.path = file.rank, file.stream, file.path
        self.name = f"{file.rank}.{file.stream}"
        self._times = TimeIndex(paths.node(file.node).times(file.rank), paths.clock(file.node))

    def size(self) -> int:
        """Size in bytes; 0 if the file is gone."""
        return size_of(self.path)

    def read(self, start: int, end: int) -> bytes:
        """Bytes ``start`` to ``end``, as far as they exist."""
        return read(self.path, start, end)

    def written(self, end: int) -> float | None:
        """About when the byte before ``end`` was written."""
        t = self._times.written(self.stream, end)
        if t is not None:
            return t
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        # The newest bytes get their record a moment later. Without records only the time of the file's end is known.
        return status.st_mtime if end >= status.st_size or self._times.known() else None

    def segments(self, start: int, data: bytes, *, rest: bool = False) -> list[Segment]:
        """``data``, which begins at offset ``start``, in segments. ``rest``: also the text after the last newline."""
        end = start + len(data)
        marks = self._times.marks(self.stream, start, end)
        found = [
            Segment(self, start + low, start + high, _when(marks, start + high), data[low:high])
            for low, high in cuts(data, [mark.size - start for mark in _sparse(marks)], rest)
        ]
        if found and found[-1].t is None:
            last = found.pop()
            found.append(Segment(self, last.start, last.end, self.written(last.end), last.data))
        return found


def read(path: Path, start: int, end: int) -> bytes:
    """Bytes ``start`` to ``end`` of a file, as far as they exist."""
    try:
        with open_plain(path, buffering=0) as file:
            file.seek(start)
            return file.read(max(0, end - start))
    except OSError:
        return b""


def find(paths: JobPaths) -> dict[str, Log]:
    """The logs that exist, by name."""
    found = (Log(file, paths) for file in logs.files(paths))
    return {log.name: log for log in found}


def cuts(data: bytes, at: list[int], rest: bool = False) -> list[tuple[int, int]]:
    """Ranges to cut ``data`` into: after the last newline before each of ``at``, at most ``LINE_LIMIT`` bytes each.

    The text after the last newline is left out, unless it is longer than ``LINE_LIMIT``, or ``rest`` is set.
    """
    found: list[tuple[int, int]] = []
    low = 0
    whole = data.rfind(b"\n") + 1
    for mark in [*(mark for mark in at if mark < whole), whole]:
        high = data.rfind(b"\n", low, max(low, mark)) + 1
        if high > low:
            found += _pieces(data, low, high)
            low = high
    while len(data) - low > LINE_LIMIT:
        high = low + boundary(data[low : low + LINE_LIMIT + 4], LINE_LIMIT)
        found.append((low, high))
        low = high
    if rest and low < len(data):
        found.append((low, len(data)))
    return found


def _pieces(data: bytes, low: int, high: int) -> list[tuple[int, int]]:
    """Complete lines ``low`` to ``high``, in pieces of at most ``LINE_LIMIT`` bytes."""
    found = []
    while high - low > LINE_LIMIT:
        end = data.rfind(b"\n", low, low + LINE_LIMIT) + 1
        if end <= low:
            end = low + boundary(data[low : low + LINE_LIMIT + 4], LINE_LIMIT)
        found.append((low, end))
        low = end
    found.append((low, high))
    return found


def from_character(data: bytes) -> int:
    """Offset of the first complete character of ``data`` (UTF-8: at most 3)."""
    for index in range(min(4, len(data))):
        if data[index] & 0xC0 != 0x80:
            return index
    return 0


def boundary(data: bytes, at: int) -> int:
    """The last offset at or before ``at`` that is not inside a character (UTF-8: at most 3 bytes before)."""
    if at >= len(data):
        return len(data)
    for back in range(4):
        if at - back >= 0 and data[at - back] & 0xC0 != 0x80:
            return at - back
    return at


def unfinished(data: bytes) -> int:
    """How many bytes at the end of ``data`` begin a character that is not complete."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            length = 2 if byte & 0xE0 == 0xC0 else 3 if byte & 0xF0 == 0xE0 else 4 if byte & 0xF8 == 0xF0 else 1
            return back if length > back else 0
    return 0


def _sparse(marks: list[Mark]) -> list[Mark]:
    """The last mark of each time span of ``SPAN`` seconds."""
    found: list[Mark] = []
    begin = float("-inf")
    for mark in marks:
        if found and mark.t - begin < SPAN:
            found[-1] = mark
        else:
            begin = mark.t
            found.append(mark)
    return found


def _when(marks: list[Mark], end: int) -> float | None:
    """The time of the first mark at or after offset ``end``."""
    low, high = 0, len(marks)
    while low < high:
        middle = (low + high) // 2
        if marks[middle].size >= end:
            high = middle
        else:
            low = middle + 1
    return marks[low].t if low < len(marks) else None
