"""The ranks' curves and progress as the still picture shows them: read as they grow, kept in bounded memory."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from ..protocol.paths import JobPaths
from ..store import metrics
from .picture import Trace
from .snapshot import CURVES, Progress

BUCKETS = 120
"""Points of one drawn curve, at the most: one for two pixels of its picture."""
NAMES = 1000
"""Curves whose last value is known; a job that logs under ever new names must not fill the kernel's memory."""
NAME_LENGTH = 200
FURTHEST = 2.0**53
"""Steps beyond it are no longer whole numbers for a float; no real one is."""
CATCH_UP = 1.0
"""Seconds that reading to the end may take when the job has ended."""

PIECE = 128 * 1024
"""Bytes of a rank that are read at once: meanwhile the waiting cell hears no interrupt."""


class Curves:
    """Last value and course of each curve, and the progress: rank 0's where it reports one, else the lowest rank's."""

    def __init__(self, paths: JobPaths) -> None:
        self._paths = paths
        self._offsets: dict[int, int] = {}
        self._values: dict[str, tuple[int, float]] = {}
        self._courses: dict[str, Course] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self._progress: tuple[int, Progress] | None = None

    @property
    def last(self) -> dict[str, float]:
        """Curve -> its last value, in the order in which the curves appeared."""
        return {name: value for name, (_, value) in self._values.items()}

    @property
    def traces(self) -> dict[str, Trace]:
        """Curve -> what is drawn of it, for the first ``CURVES`` of those that have more than one point."""
        return {name: course.trace() for name, course in self._courses.items() if len(course.buckets) > 1}

    @property
    def progress(self) -> Progress | None:
        """The bar, if any rank has one."""
        return self._progress[1] if self._progress else None

    def poll(self) -> int:
        """Take new records in; a number that grows with them."""
        for rank in metrics.files(self._paths):
            records, self._offsets[rank] = metrics.read(self._paths, rank, self._offsets.get(rank, 0), PIECE)
            for record in records:
                self._take(rank, record)
        return sum(self._offsets.values())

    def read_to_end(self) -> None:
        """Take in all that is there, for as long as ``CATCH_UP`` at the most."""
        until, seen = time.monotonic() + CATCH_UP, -1
        while (read := self.poll()) != seen and time.monotonic() < until:
            seen = read

    def _take(self, rank: int, record: metrics.Record) -> None:
        values, total = record.get("v"), record.get("total")
        if record.get("k") == "log" and isinstance(values, dict):
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._log(rank, name[:NAME_LENGTH], record.get("step"), value)
        elif record.get("k") == "progress" and (self._progress is None or rank <= self._progress[0]):
            bar = Progress(_number(record.get("n")), _number(total) if total else None, str(record.get("desc", "")))
            self._progress = (rank, bar)

    def _log(self, rank: int, name: str, step: object, value: float) -> None:
        if name not in self._values and len(self._values) >= NAMES:
            return
        number = value if type(value) is float else _number(value, math.inf)
        if rank <= self._values.get(name, (rank, 0.0))[0]:
            self._values[name] = (rank, number)
        if name not in self._courses and len(self._courses) >= CURVES:
            return
        # Where no step is told, records count: as the axis of a picture that is all one can have.
        count = self._counts[rank, name] = self._counts.get((rank, name), -1) + 1
        x = _number(step, math.nan) if isinstance(step, (int, float)) else float(count)
        if math.isfinite(number) and abs(x) < FURTHEST:
            if (course := self._courses.get(name)) is None:
                course = self._courses[name] = Course()
            course.add(x, number)


def _number(value: object, otherwise: float = 0.0) -> float:
    try:
        return float(value) if isinstance(value, (int, float)) else otherwise
    except OverflowError:  # an integer of hundreds of digits
        return otherwise


@dataclass
class Bucket:
    """The values of all ranks on a piece of the axis."""

    low: float
    high: float
    mean: float
    count: int = 1

    def take(self, value: float) -> None:
        """As ``add`` of a bucket with one value: a training loop's worth of them is read while the cell waits."""
        if value < self.low:
            self.low = value
        if value > self.high:
            self.high = value
        self.count += 1
        self.mean += value / self.count - self.mean / self.count

    def add(self, other: Bucket) -> None:
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.count += other.count
        # Not the sum first: two values of 1e308 have none.
        self.mean += (other.mean / self.count - self.mean / self.count) * other.count


class Course:
    """One curve over its steps: mean, minimum and maximum in at most ``BUCKETS`` buckets that widen as it grows."""

    def __init__(self) -> None:
        self.width = 1.0
        self.buckets: dict[int, Bucket] = {}
        self._first = self._last = 0
        self._least, self._most = math.inf, -math.inf

    def add(self, x: float, value: float) -> None:
        """One value; steps may come in any order, backwards too."""
        place = math.floor(x / self.width)
        if x < self._least:
            self._least = x
        if x > self._most:
            self._most = x
        if (bucket := self.buckets.get(place)) is not None:
            bucket.take(value)
            return
        if not self.buckets:
            self._first = self._last = place
        while max(self._last, place) - min(self._first, place) >= BUCKETS:
            self._widen()
            place //= 2
        self._first, self._last = min(self._first, place), max(self._last, place)
        _put(self.buckets, place, Bucket(value, value, value))

    def _widen(self) -> None:
        self.width *= 2
        merged: dict[int, Bucket] = {}
        for place, bucket in self.buckets.items():
            _put(merged, place // 2, bucket)
        self.buckets = merged
        self._first, self._last = self._first // 2, self._last // 2

    def trace(self) -> Trace:
        """As it is drawn, in order of steps."""
        places = sorted(self.buckets)
        found = [self.buckets[place] for place in places]
        return Trace(
            (*(min(max(place * self.width, self._least), self._most) for place in places[:-1]), self._most),
            tuple(bucket.mean for bucket in found),
            tuple(bucket.low for bucket in found),
            tuple(bucket.high for bucket in found),
        )


def _put(buckets: dict[int, Bucket], place: int, bucket: Bucket) -> None:
    if place in buckets:
        buckets[place].add(bucket)
    else:
        buckets[place] = bucket
