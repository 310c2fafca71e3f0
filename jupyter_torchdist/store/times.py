"""When a rank wrote which part of its output: a search in its ``.times`` file, which is never read completely."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

from ..protocol import codec
from ..protocol.disk import open_fd, read_plain
from ..protocol.times import ERR, RECORD
from .logs import STREAMS

LAG = 0.2
"""Largest delay in seconds from the write of bytes to the record that includes them."""

_WINDOW = 130
"""So many consecutive records include each stream at least once: the writer repeats the record of a quiet stream."""


class Mark(NamedTuple):
    """At time ``t`` (seconds since the epoch) the stream's file had ``size`` bytes."""

    t: float
    size: int


class TimeIndex:
    """The ``.times`` file of one rank. Each query opens it for a moment. A missing file has no records.

    ``clock``: the file that tells how far the clock of the rank's node is ahead (``JobPaths.clock``). Times here are on
    the driver's clock.
    """

    def __init__(self, path: Path, clock: Path | None = None) -> None:
        self._path, self._clock = path, clock
        self._found: dict[str, tuple[int, int]] = {}
        """By stream: the last size searched for, and its index. A reader usually asks for the next bytes."""

    def known(self) -> bool:
        """Whether there is any record."""
        try:
            return os.stat(self._path).st_size >= RECORD.size
        except OSError:
            return False

    def written(self, stream: str, offset: int) -> float | None:
        """About when the byte before ``offset`` was written; None if no record tells."""
        with _Records(self._path, stream) as records:
            index = self._first_of_size(records, stream, max(offset, 1))
            mark = records.next(index)
            if mark is None:
                return None
            before = records.last(index - 1) or Mark(mark.t - LAG, 0)
            return _between(before, mark, offset) - self._ahead()

    def offset(self, stream: str, t: float) -> int:
        """How many bytes of the stream had been written by ``t``, as far as the records tell."""
        with _Records(self._path, stream) as records:
            mark = records.last(records.first_after(t + self._ahead()) - 1)
            return mark.size if mark else 0

    def marks(self, stream: str, start: int, end: int, limit: int = 20_000) -> list[Mark]:
        """Marks of bytes ``start`` to ``end``, with the first at or after ``end``. Reads at most ``limit`` records."""
        with _Records(self._path, stream) as records:
            found, size, late = [], start, self._ahead()
            for mark in records.run(self._first_of_size(records, stream, start + 1), limit):
                if mark.size > size:
                    found.append(Mark(mark.t - late, mark.size))
                    size = mark.size
                if size >= end:
                    break
            return found

    def _ahead(self) -> float:
        return 0.0 if self._clock is None else ahead(self._clock)

    def _first_of_size(self, records: _Records, stream: str, size: int) -> int:
        before, index = self._found.get(stream, (0, 0))
        found = records.first_of_size(size, index if before <= size and index <= records.count else 0)
        self._found[stream] = (size, found)
        return found


def ahead(clock: Path) -> float:
    """Seconds that the clock of a node is ahead of the driver's, as ``JobPaths.clock`` tells; 0 if it does not."""
    try:
        found = codec.loads(read_plain(clock))["ahead"]
    except (OSError, ValueError, LookupError, TypeError):
        return 0.0
    return found if isinstance(found, float) and math.isfinite(found) else 0.0


def _between(before: Mark, mark: Mark, offset: int) -> float:
    """Linear interpolation between two marks; bytes are written at most ``LAG`` seconds before their mark."""
    begin = min(max(before.t, mark.t - LAG), mark.t)
    share = (offset - before.size) / max(1, mark.size - before.size)
    return begin + (mark.t - begin) * min(1.0, max(0.0, share))


class _Records:
    """The records of an open file. Indices count the records of both streams."""

    def __init__(self, path: Path, stream: str) -> None:
        self._flag = ERR if STREAMS.index(stream) else 0
        try:
            self._fd = open_fd(path)
            self.count = os.fstat(self._fd).st_size // RECORD.size
        except OSError:
            self._fd, self.count = -1, 0

    def __enter__(self) -> _Records:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def _read(self, first: int, end: int) -> list[tuple[float, int]]:
        first, end = max(0, first), min(end, self.count)
        if end <= first:
            return []
        data = os.pread(self._fd, (end - first) * RECORD.size, first * RECORD.size)
        return list(RECORD.iter_unpack(data[: len(data) // RECORD.size * RECORD.size]))

    def _mine(self, word: int) -> bool:
        return word & ERR == self._flag

    def last(self, index: int) -> Mark | None:
        """The stream's last record at or before ``index``."""
        for t, word in reversed(self._read(index + 1 - _WINDOW, index + 1)):
            if self._mine(word):
                return Mark(t, word & ~ERR)
        return None

    def next(self, index: int) -> Mark | None:
        """The stream's first record at or after ``index``."""
        for t, word in self._read(index, index + _WINDOW):
            if self._mine(word):
                return Mark(t, word & ~ERR)
        return None

    def run(self, index: int, limit: int) -> list[Mark]:
        """The stream's records from ``index`` on."""
        return [Mark(t, word & ~ERR) for t, word in self._read(index, index + limit) if self._mine(word)]

    def first_of_size(self, size: int, low: int = 0) -> int:
        """The first index, from ``low`` on, at which the stream had ``size`` bytes; ``count`` if none."""
        high = self.count
        while low < high:
            middle = (low + high) // 2
            mark = self.last(middle)
            if mark is not None and mark.size >= size:
                high = middle
            else:
                low = middle + 1
        return low

    def first_after(self, t: float) -> int:
        """The first index whose record is later than ``t``."""
        low, high = 0, self.count
        while low < high:
            middle = (low + high) // 2
            ((at, _),) = self._read(middle, middle + 1) or [(float("inf"), 0)]
            if at > t:
                high = middle
            else:
                low = middle + 1
        return low
