"""Progress and a spark line of a job that runs, from a few pieces of its metrics files, however large they are."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..protocol import codec
from ..protocol.feed import Progress
from ..protocol.paths import JobPaths
from ..store import metrics

POINTS = 40
"""Numbers of a spark line, at the most."""

SMALL = 16 * 1024
"""Bytes of a file that is read as a whole."""

PIECE = 4 * 1024
"""Bytes that are read at one place of a larger one; a line is some hundred bytes long."""

END = 16 * 1024
"""Bytes at the end of a file in which the latest progress is looked for."""

LOOKED_AT = 8
"""Ranks whose progress is asked for where rank 0 has none."""


class Glance:
    """What the panel shows of one job's metrics. Only what grew is read again."""

    def __init__(self, paths: JobPaths) -> None:
        self._paths = paths
        self._sizes: dict[int, int] = {}
        self._progress: dict[int, Progress] = {}
        self._sampled = Sampled()

    def look(self) -> tuple[Progress | None, list[float]]:
        """Progress (rank 0's where it reports one, else the lowest rank's), and rank 0's first curve in few numbers."""
        files = metrics.files(self._paths)
        for rank in sorted(files)[:LOOKED_AT]:
            size = _size(files[rank])
            if size == self._sizes.get(rank, 0):
                continue
            self._sizes[rank] = size
            if rank == 0:
                self._sampled.read(files[rank], size)
            if found := latest_progress(files[rank], size):
                self._progress[rank] = found
        first = min(self._progress, default=None)
        return None if first is None else self._progress[first], self._sampled.numbers


class Sampled:
    """At most ``POINTS`` numbers of a file's first curve, at places that stay where they are while the file grows."""

    def __init__(self) -> None:
        self.numbers: list[float] = []
        self._name: str | None = None
        self._at: dict[int, float | None] = {}

    def read(self, path: Path, size: int) -> None:
        """Look at a file that has ``size`` bytes by now."""
        if self._name is None:
            self._name = first_name(_lines(path, 0, PIECE))
        if self._name is None:
            return
        if size <= SMALL:
            found = list(values(_lines(path, 0, size), self._name))
            step = -(-len(found) // (POINTS - 1)) if found else 1
            self.numbers = [*found[::step], *found[-1:]][:POINTS]
        else:
            self.numbers = self._sample(path, size, self._name)

    def _sample(self, path: Path, size: int, name: str) -> list[float]:
        stride = PIECE
        while size // stride >= POINTS - 1:
            stride *= 2
        places = range(0, size - PIECE, stride)
        for place in places:
            if place not in self._at:
                self._at[place] = next(values(_lines(path, place, PIECE), name), None)
        last = next(values(reversed(_lines(path, size - PIECE, PIECE)), name), None)
        return [value for value in (*(self._at[place] for place in places), last) if value is not None]


def latest_progress(path: Path, size: int) -> Progress | None:
    """The last bar in the last ``END`` bytes."""
    for line in reversed(_lines(path, max(0, size - END), END)):
        record = _record(line) if b'"progress"' in line else {}
        if record.get("k") == "progress" and (done := number(record.get("n"))) is not None:
            return {"desc": str(record.get("desc") or ""), "n": done, "total": number(record.get("total")) or None}
    return None


def first_name(lines: list[bytes]) -> str | None:
    """The first curve of all; what was logged on purpose goes before what was found by itself."""
    records = [record for line in lines if (record := _record(line)).get("k") == "log"]
    named = [(bool(record.get("auto")), name) for record in records for name in _logged(record)]
    return min(named, key=lambda pair: pair[0])[1] if named else None


def values(lines: Iterable[bytes], name: str) -> Iterator[float]:
    """What can be drawn of a curve, line by line."""
    key = json.dumps(name).encode()
    for line in lines:
        if key in line and (record := _record(line)).get("k") == "log":
            value = number(_logged(record).get(name))
            if value is not None:
                yield value


def number(value: object) -> float | None:
    """``value`` where it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _logged(record: metrics.Record) -> dict[str, object]:
    logged = record.get("v")
    return logged if isinstance(logged, dict) else {}


def _lines(path: Path, offset: int, limit: int) -> list[bytes]:
    """The lines that end in ``limit`` bytes from ``offset`` on; the first one may have begun before."""
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            return file.read(limit).split(b"\n")[:-1]
    except OSError:
        return []


def _record(line: bytes) -> metrics.Record:
    """Empty for a line that is damaged or a part of one."""
    try:
        record = codec.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
