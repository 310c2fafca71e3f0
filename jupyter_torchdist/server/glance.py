"""Progress, sparkline and broken curves of a running job, from small pieces of its metrics files, however large."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..feed.status import sum_of
from ..protocol import codec
from ..protocol.disk import open_plain, size_of
from ..protocol.feed import Progress
from ..protocol.paths import JobPaths
from ..store import metrics

POINTS = 40
"""The largest number of points in a sparkline."""

SMALL = 16 * 1024
"""Bytes; a file up to this size is read completely."""

PIECE = 4 * 1024
"""Bytes that are read at each position of a larger file; a line has some hundred bytes."""

END = 16 * 1024
"""Bytes at the end of a file in which the latest progress and the last values are searched."""

LOOKED_AT = 8
"""How many ranks are searched for progress and for broken curves."""


class Seen(NamedTuple):
    """What one look has found."""

    progress: Progress | None
    """Rank 0's if it reports one, else the lowest rank's."""
    samples: float | None
    """Samples that all ranks have trained with; None: unknown, or not all ranks are looked at."""
    spark: list[float]
    """A few values of rank 0's first curve."""
    broken: list[str]
    """Curves whose last value on a rank is not a finite number."""


class Glance:
    """What the panel shows of one job's metrics. Only files that grew are read again."""

    def __init__(self, paths: JobPaths) -> None:
        self._paths = paths
        self._sizes: dict[int, int] = {}
        self._progress: dict[int, Progress] = {}
        self._samples: dict[int, int] = {}
        self._broken: dict[int, list[str]] = {}
        self._sampled = Sampled()

    def look(self) -> Seen:
        """Read what is new."""
        files = metrics.files(self._paths)
        for rank in sorted(files)[:LOOKED_AT]:
            size = size_of(files[rank])
            if size == self._sizes.get(rank, 0):
                continue
            self._sizes[rank] = size
            if rank == 0:
                self._sampled.read(files[rank], size)
            lines = _lines(files[rank], max(0, size - END), END)
            if found := latest_progress(lines):
                self._progress[rank] = found
            if (trained := latest_samples(lines)) is not None:
                self._samples[rank] = trained
            self._broken[rank] = broken(lines)
        first = min(self._progress, default=None)
        names = list(dict.fromkeys(name for _, names in sorted(self._broken.items()) for name in names))
        samples = sum_of(self._samples.values()) if len(files) <= LOOKED_AT else None
        return Seen(None if first is None else self._progress[first], samples, self._sampled.numbers, names)


class Sampled:
    """At most ``POINTS`` values of a file's first curve, at positions that stay the same while the file grows."""

    def __init__(self) -> None:
        self.numbers: list[float] = []
        self._name: str | None = None
        self._at: dict[int, float | None] = {}

    def read(self, path: Path, size: int) -> None:
        """Sample a file that now has ``size`` bytes."""
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


def latest_progress(lines: Sequence[bytes]) -> Progress | None:
    """The last progress bar."""
    for line in reversed(lines):
        record = _record(line) if b'"progress"' in line else {}
        if record.get("k") == "progress" and (done := number(record.get("n"))) is not None:
            return {"desc": str(record.get("desc") or ""), "n": done, "total": number(record.get("total")) or None}
    return None


def latest_samples(lines: Sequence[bytes]) -> int | None:
    """The last count of samples."""
    for line in reversed(lines):
        record = _record(line) if b'"samples"' in line else {}
        if record.get("k") == "samples" and isinstance(record.get("n"), int):
            return int(record["n"])
    return None


def broken(lines: Sequence[bytes]) -> list[str]:
    """Curves whose last value is NaN or infinite."""
    if not any(b'"@' in line for line in lines):  # their form in the file
        return []
    last = {name: value for line in lines if b'"log"' in line for name, value in _logged(_record(line)).items()}
    return [name for name, value in last.items() if isinstance(value, float) and not math.isfinite(value)]


def first_name(lines: list[bytes]) -> str | None:
    """The first curve; curves that the user logged come before automatic ones."""
    records = [record for line in lines if (record := _record(line)).get("k") == "log"]
    named = [(bool(record.get("auto")), name) for record in records for name in _logged(record)]
    return min(named, key=lambda pair: pair[0])[1] if named else None


def values(lines: Iterable[bytes], name: str) -> Iterator[float]:
    """The finite values of a curve, line by line."""
    key = json.dumps(name).encode()
    for line in lines:
        if key in line and (record := _record(line)).get("k") == "log":
            value = number(_logged(record).get(name))
            if value is not None:
                yield value


def number(value: object) -> float | None:
    """``value`` as a float if it is a finite number, else None."""
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
    """The lines that end within ``limit`` bytes from ``offset`` on; the first line may be cut at its start."""
    try:
        with open_plain(path, buffering=0) as file:
            file.seek(offset)
            return file.read(limit).split(b"\n")[:-1]
    except OSError:
        return []


def _record(line: bytes) -> metrics.Record:
    """The record of a line; empty for a damaged or partial line."""
    try:
        record = codec.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
