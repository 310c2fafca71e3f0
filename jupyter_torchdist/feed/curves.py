"""Answers to questions about curves: as many points as the screen can show, with the range merged into each."""

from __future__ import annotations

import math
from array import array
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..protocol.errors import UserError
from ..protocol.feed import CurvesAsked, Drawn, Series
from .bins import Bins, joined
from .curveindex import Closer, CurveIndex, RankCurves
from .merging import Grid

Answer = Mapping[str, Any]
Work = Generator[None, None, Answer]
"""A generator that computes an answer. It yields often, so that the caller can pause it when the time is up."""

Closers = dict[int, dict[tuple[str, ...], Closer]]
"""Lines that were read again for a range, by rank and by the names of the bins."""

POINTS = 40_000
"""Largest number of points in one answer, of all its curves together."""

SERIES = 4096
"""Largest number of curves times ranks in one answer."""

RANGE_BYTES = 64 * 1024 * 1024
"""Largest number of bytes read again for a range; a wider range is answered from the bins in memory."""

COLUMNS: tuple[Literal["x", "y", "low", "high"], ...] = ("x", "y", "low", "high")
"""Columns of a series, each an ``array`` of doubles."""

_NONE = (array("d"),) * len(COLUMNS)
_FEWEST = 16


@dataclass(frozen=True)
class Question:
    """A ``curves`` question. ``low`` and ``high`` are infinite if no range was given."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    band: bool
    axis: str
    low: float
    high: float
    width: int

    def reaches(self, step: float, t: float) -> bool:
        """Whether a point is in the range."""
        return self.low <= (step if self.axis == "step" else t) <= self.high

    @staticmethod
    def of(asked: CurvesAsked, index: CurveIndex) -> Question:
        """The question for the ranks and curves there are. Raises ``UserError`` for more than one answer can hold."""
        known = sorted(index.ranks)
        wanted = [rank for rank in known if rank in asked.ranks] if asked.ranks else known
        ranks = wanted[:1] if asked.mode == "rank0" else wanted
        names = [name for name in asked.names or index.names.kept if name in index.names.kept]
        if len(names) * len(ranks) > SERIES:
            raise UserError(f"{len(names)} curves of {len(ranks)} ranks are too many for one plot", "choose fewer")
        band = asked.mode == "band"
        shown = len(names) * (1 if band else len(ranks))
        width = min(max(int(asked.width), _FEWEST), max(_FEWEST, POINTS // max(1, shown)))
        return Question(
            tuple(names),
            tuple(ranks),
            band,
            asked.x,
            -math.inf if asked.low is None else asked.low,
            math.inf if asked.high is None else asked.high,
            width,
        )

    @property
    def ranged(self) -> bool:
        return math.isfinite(self.low) or math.isfinite(self.high)


@dataclass
class Points:
    """One curve of one rank, sorted by x. Each point merges ``count`` lines; ``finite`` of them have a finite value."""

    x: list[float] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    finite: list[float] = field(default_factory=list)
    count: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.x)

    @property
    def complete(self) -> bool:
        return all(count == 1 for count in self.count)

    def add_from(self, bins: Bins, name: str, axis: str, begin: int) -> None:
        """Append the bins from ``begin`` on."""
        cells = bins.cells[bins.names.index(name)]
        x = bins.x if axis == "step" else bins.t
        columns: tuple[array[Any], ...] = (x, cells.mean, cells.low, cells.high, cells.finite, bins.count)
        for mine, its in zip(self._columns(), columns, strict=True):
            mine.extend(its[begin:])

    def add(self, bins: Bins, name: str, asked: Question) -> None:
        """Append the bins that overlap the range."""
        if not asked.ranged:
            self.add_from(bins, name, asked.axis, 0)
            return
        cells = bins.cells[bins.names.index(name)]
        x = bins.x if asked.axis == "step" else bins.t
        columns: tuple[array[Any], ...] = (x, cells.mean, cells.low, cells.high, cells.finite, bins.count)
        inside = bins.inside(asked.axis, asked.low, asked.high)
        for mine, its in zip(self._columns(), columns, strict=True):
            mine.extend(map(its.__getitem__, inside))

    def _append(self, x: float, mean: float, low: float, high: float, finite: float, count: float) -> None:
        self.x.append(x)
        self.mean.append(mean)
        self.low.append(low)
        self.high.append(high)
        self.finite.append(finite)
        self.count.append(int(count))

    def sorted(self) -> Points:
        if all(map(float.__le__, self.x, self.x[1:])):
            return self
        order = sorted(range(len(self)), key=self.x.__getitem__)
        return Points(*([column[index] for index in order] for column in self._columns()))

    def _columns(self) -> tuple[list[Any], ...]:
        return self.x, self.mean, self.low, self.high, self.finite, self.count

    def decimated(self, width: int) -> Points:
        """At most ``width`` points: neighbours are merged."""
        return self.joined(max(1, -(-len(self) // width)))

    def joined(self, each: int) -> Points:
        """``each`` neighbours merged into one point."""
        if each == 1:
            return self
        found = Points()
        for begin in range(0, len(self), each):
            part = slice(begin, begin + each)
            finite = self.finite[part]
            total = sum(finite)
            mean = sum(m * (n / total) for m, n in zip(self.mean[part], finite, strict=True)) if total else 0.0
            lows, highs = min(self.low[part]), max(self.high[part])
            found._append(self.x[begin], mean, lows, highs, total, sum(self.count[part]))
        return found

    def to_json(self, name: str, rank: int | None, before: tuple[array[float], ...] = _NONE) -> Series:
        """A point without finite values is NaN. After a point with some non-finite values a NaN follows: a gap."""
        columns = [self.x, self.mean, self.low, self.high]
        if any(map(float.__ne__, self.finite, map(float, self.count))):
            columns = self._with_gaps()
        x, y, low, high = (earlier + array("d", column) for earlier, column in zip(before, columns, strict=True))
        return {"name": name, "rank": rank, "x": x, "y": y, "low": low, "high": high}

    def _with_gaps(self) -> list[list[float]]:
        rows: list[tuple[float, ...]] = []
        for x, mean, low, high, finite, count in zip(*self._columns(), strict=True):
            rows += [(x, mean, low, high)] if finite else []
            rows += [(x, math.nan, math.nan, math.nan)] if finite < count else []
        return list(map(list, zip(*rows, strict=True)))


def answer(index: CurveIndex, asked: CurvesAsked) -> Work:
    """Compute the series. Raises ``UserError``."""
    with index.lock:
        question = Question.of(asked, index)
        version = index.version
    closer = (yield from _closer(index, question)) if question.ranged else {}
    found = _Answer(index, question, closer)
    for name in question.names:
        for ranks in [question.ranks] if question.band else [(rank,) for rank in question.ranks]:
            if not found.add_merged(name, ranks):
                yield from found.add(name, ranks)
            yield
    drawn: Drawn = {"version": version, "complete": found.complete, "series": found.series}
    return drawn


class _Answer:
    """The series of one answer, added one by one."""

    def __init__(self, index: CurveIndex, question: Question, closer: Closers) -> None:
        self.series: list[Series] = []
        self.complete = True
        self._index, self._question, self._closer = index, question, closer
        self._grids: dict[tuple[tuple[int, int], ...], Grid] = {}

    def add_merged(self, name: str, ranks: tuple[int, ...]) -> bool:
        """Add one line for ``ranks`` from bins merged earlier. Returns False if that is not possible."""
        with self._index.lock:
            grid = None if self._question.ranged else self._grid(name, ranks)
            if grid is None or not grid.common or grid.gaps(name):
                return False
            each, axis = max(1, -(-grid.longest // self._question.width)), self._question.axis
            columns = self._index.merging.columns(grid, name, axis, each)
            rests = [Points() for _ in grid.bins]
            for rest, bins in zip(rests, grid.bins, strict=True):
                rest.add_from(bins, name, axis, columns.done)
            if len(rests) == 1:
                rest = rests[0].joined(each)
                whole = rest.complete
            else:
                x = [bins.x if axis == "step" else bins.t for bins in grid.bins]
                until = _slowest([one[-1] for one in x], min(one[0] for one in x))
                rests = [rest for rest in rests if len(rest)]
                rest, whole = _band(rests, self._question.width, until, columns.spacing)
            merged = (columns.x, columns.mean, columns.low, columns.high)
            series = rest.to_json(name, None if self._question.band else ranks[0], merged)
        self.series.append(series)
        self.complete = self.complete and whole and each == columns.per == 1
        return True

    def _grid(self, name: str, ranks: tuple[int, ...]) -> Grid | None:
        """The grid of a curve; None if the ranks log the curve together with different names."""
        found: list[Bins] = []
        for rank in ranks:
            found += [bins for names, bins in self._index.ranks[rank].by_names.items() if name in names]
        if not found or len(found) > len(ranks) or any(bins.names != found[0].names for bins in found):
            return None
        key = tuple((id(bins), bins.per) for bins in found)  # an answer may go on after bins were joined
        if key not in self._grids:
            self._grids[key] = Grid.of(tuple(found))
        return self._grids[key]

    def add(self, name: str, ranks: tuple[int, ...]) -> Generator[None, None, None]:
        """Add one line for ``ranks``. Works for any logged data."""
        found: list[Points] = []
        for rank in ranks:
            with self._index.lock:
                points = _points(self._index.ranks[rank], self._closer.get(rank, {}), name, self._question)
            if len(points):
                found.append(points)
            yield
        if self._question.band:
            until = _slowest([points.x[-1] for points in found], min(points.x[0] for points in found)) if found else 0.0
            band, whole = _band(found, self._question.width, until)
            self.series.append(band.to_json(name, None))
            self.complete = self.complete and whole
        elif found:
            shown = found[0].decimated(self._question.width)
            self.series.append(shown.to_json(name, ranks[0]))
            self.complete = self.complete and shown.complete


def _points(curves: RankCurves, closer: dict[tuple[str, ...], Closer], name: str, question: Question) -> Points:
    points = Points()
    for names, bins in curves.by_names.items():
        if name in names:
            points.add(closer[names].bins if names in closer else bins, name, question)
    return points.sorted()


def _closer(index: CurveIndex, question: Question) -> Generator[None, None, Closers]:
    """Read the range again from the files if bins are too coarse for it. By rank and by the names of the bins."""
    with index.lock:
        readers = {rank: list(_plans(index.ranks[rank], question)) for rank in question.ranks}
    plans = [reader for of_rank in readers.values() for reader in of_rank]
    if sum(reader.end - reader.offset for reader in plans) > RANGE_BYTES:
        return {}
    for reader in plans:
        while reader.offset < reader.end and reader.advance(reader.end):
            yield
    return {rank: {reader.of: reader for reader in of_rank} for rank, of_rank in readers.items()}


def _plans(curves: RankCurves, question: Question) -> Iterator[Closer]:
    wanted = frozenset(question.names)
    for bins in curves.by_names.values():
        inside = bins.inside(question.axis, question.low, question.high) if wanted & set(bins.names) else []
        merged = any(bins.count[number] > 1 for number in inside)
        if merged and len(inside) < question.width:
            span = range(inside[0], inside[-1] + 1)
            yield Closer(curves, bins, span, wanted, question.reaches)


def _slowest(lasts: Sequence[float], begin: float) -> float:
    """Where a mean of ranks ends: beyond the slowest rank it would be of fewer ranks, and dip or jump.

    ``lasts``: the last x of each rank. A rank that stopped in the first half has no say.
    """
    middle = (begin + max(lasts)) / 2
    return min(last for last in lasts if last >= middle)


def _band(ranks: list[Points], width: int, until: float, apart: float = 0.0) -> tuple[Points, bool]:
    """Mean, minimum and maximum over the ranks, and whether every point is a single step of each rank.

    ``until``: the last x. ``apart``: the smallest allowed distance between two points.
    """
    if not ranks:
        return Points(), True
    begin = min(points.x[0] for points in ranks)
    end = max(points.x[-1] for points in ranks)
    # The spacing of the coarsest rank; with less, buckets would alternate between ranks (a zigzag).
    spacing = max((points.x[-1] - points.x[0]) / max(1, len(points) - 1) for points in ranks)
    spacing = max(spacing, apart, (end - begin) / max(1, width - 1))
    buckets: dict[int, list[tuple[float, float, float, float, float, int]]] = {}
    for points in ranks:
        for bucket, row in _bucketed(points, begin, spacing).items():
            buckets.setdefault(bucket, []).append(row)
    last = int((until - begin) / spacing + 1e-6) if spacing > 0 and until < end else None
    band, whole = Points(), True
    for bucket, rows in sorted(buckets.items()):
        if last is not None and bucket > last:
            break
        means = [mean for _, mean, _, _, finite, _ in rows if finite]
        mean = math.fsum(value / len(means) for value in means) if means else 0.0
        lows, highs = min(row[2] for row in rows), max(row[3] for row in rows)
        band._append(min(row[0] for row in rows), mean, lows, highs, sum(r[4] for r in rows), sum(r[5] for r in rows))
        whole = whole and all(row[5] == 1 for row in rows)
    return band, whole


def _bucketed(points: Points, begin: float, spacing: float) -> dict[int, tuple[float, float, float, float, float, int]]:
    found: dict[int, tuple[float, float, float, float, float, int]] = {}
    for x, mean, low, high, finite, count in zip(*points._columns(), strict=True):
        bucket = int((x - begin) / spacing + 1e-6) if spacing > 0 else 0
        row = found.get(bucket)
        if row is not None:
            mean = joined(row[1], row[4], mean, finite)
            x, low, high, finite, count = (
                row[0],
                min(row[2], low),
                max(row[3], high),
                row[4] + finite,
                row[5] + count,
            )
        found[bucket] = (x, mean, low, high, finite, count)
    return found
