"""When a rank wrote which part of its output: searched in its ``.times`` file, which is never read whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ..protocol.times import ERR, RECORD
from .logs import STREAMS

LAG = 0.2
"""Seconds after which, at the latest, written bytes are in a record."""

_WINDOW = 130
"""Records among which each stream has one: the writer repeats the quiet stream's."""


class Mark(NamedTuple):
    """By ``t`` (seconds since the epoch) the stream's file had ``size`` bytes."""

    t: float
    size: int


class TimeIndex:
    """One rank's file, opened for a moment by each question; one that is missing knows nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, tuple[int, int]] = {}
        """Of a stream, a size that was asked for and the index found: who reads along asks for the next bytes."""

    def known(self) -> bool:
        """Whether there is any record."""
        try:
            return os.stat(self._path).st_size >= RECORD.size
        except OSError:
            return False

    def written(self, stream: str, offset: int) -> float | None:
        """About when the byte before ``offset`` was written; None where no record tells."""
        with _Records(self._path, stream) as records:
            index = self._first_of_size(records, stream, max(offset, 1))
            mark = records.next(index)
            if mark is None:
                return None
            before = records.last(index - 1) or Mark(mark.t - LAG, 0)
            return _between(before, mark, offset)

    def offset(self, stream: str, t: float) -> int:
        """How many bytes of the stream had been written by ``t``, as far as the records tell."""
        with _Records(self._path, stream) as records:
            mark = records.last(records.first_after(t) - 1)
            return mark.size if mark else 0

    def marks(self, stream: str, start: int, end: int, limit: int = 20_000) -> list[Mark]:
        """The records of bytes ``start`` to ``end``, the first that reaches ``end`` included, of at most ``limit``."""
        with _Records(self._path, stream) as records:
            found, size = [], start
            for mark in records.run(self._first_of_size(records, stream, start + 1), limit):
                if mark.size > size:
                    found.append(mark)
                    size = mark.size
                if size >= end:
                    break
            return found

    def _first_of_size(self, records: _Records, stream: str, size: int) -> int:
        before, index = self._found.get(stream, (0, 0))
        found = records.first_of_size(size, index if before <= size and index <= records.count else 0)
        self._found[stream] = (size, found)
        return found


def _between(before: Mark, mark: Mark, offset: int) -> float:
    """Linear between two records, but bytes are recorded ``LAG`` after they were written at the latest."""
    begin = min(max(before.t, mark.t - LAG), mark.t)
    share = (offset - before.size) / max(1, mark.size - before.size)
    return begin + (mark.t - begin) * min(1.0, max(0.0, share))


class _Records:
    """The records of an open file; indices count those of both streams."""

    def __init__(self, path: Path, stream: str) -> None:
        self._flag = ERR if STREAMS.index(stream) else 0
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
