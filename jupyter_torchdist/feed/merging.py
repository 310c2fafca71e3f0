"""Merges bins that have the same steps in all ranks, column by column. Each closed bin is merged only once.

A view of a running job asks for these twice a second.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field

from .bins import Bins

KEPT = 512
"""Largest number of merged curves kept for one job (up to some ten kilobytes each)."""


@dataclass
class Columns:
    """The merged part of one curve: ``done`` bins of ``per`` lines from each rank."""

    per: int = 0
    done: int = 0
    x: array[float] = field(default_factory=lambda: array("d"))
    mean: array[float] = field(default_factory=lambda: array("d"))
    low: array[float] = field(default_factory=lambda: array("d"))
    high: array[float] = field(default_factory=lambda: array("d"))

    @property
    def spacing(self) -> float:
        """The distance of the last two points; 0 if there are fewer than two."""
        return self.x[-1] - self.x[-2] if len(self.x) > 1 else 0.0


@dataclass(frozen=True)
class Grid:
    """The bins of all ranks for names logged together. ``common``: how many are closed and have the same steps."""

    bins: tuple[Bins, ...]
    common: int

    @staticmethod
    def of(bins: tuple[Bins, ...]) -> Grid:
        """``common`` is 0 if ranks logged different steps, or steps went backwards."""
        first = bins[0]
        common = max(0, min(map(len, bins)) - 1)
        alike = all(one.per == first.per and one.in_order for one in bins)
        steps = first.x[:common].tobytes()
        alike = alike and all(one.count[:common].count(one.per) == common for one in bins)
        alike = alike and all(one.x[:common].tobytes() == steps for one in bins[1:])
        return Grid(bins, common if alike else 0)

    @property
    def longest(self) -> int:
        return max(map(len, self.bins))

    def gaps(self, name: str) -> bool:
        """Whether any value of ``name`` is not finite."""
        place = self.bins[0].names.index(name)
        return any(one.cells[place].gaps for one in self.bins)


class Merging:
    """The merged curves of one job."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[object, ...], Columns] = OrderedDict()

    def columns(self, grid: Grid, name: str, axis: str, each: int) -> Columns:
        """The common bins of ``grid``, ``each`` bins per point: mean, minimum and maximum over the ranks."""
        key = (*map(id, grid.bins), name, axis, each)
        columns = self._kept.pop(key, None)
        if columns is None or columns.per != grid.bins[0].per:
            columns = Columns(per=grid.bins[0].per)
        self._kept[key] = columns
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        stop = grid.common // each * each
        if stop > columns.done:
            _extend(columns, grid, name, axis, each, stop)
        return columns


def _extend(columns: Columns, grid: Grid, name: str, axis: str, each: int, stop: int) -> None:
    place = grid.bins[0].names.index(name)
    cells = [one.cells[place] for one in grid.bins]
    begin, columns.done = columns.done, stop
    parts = [slice(begin + offset, stop, each) for offset in range(each)]
    first = [(one.x if axis == "step" else one.t)[parts[0]] for one in grid.bins[: 1 if axis == "step" else None]]
    lows = [one.low[part] for one in cells for part in parts]
    highs = [one.high[part] for one in cells for part in parts]
    means = [one.mean[part] for one in cells for part in parts]
    columns.x.extend(first[0] if len(first) == 1 else map(min, *first))
    columns.low.extend(lows[0] if len(lows) == 1 else map(min, *lows))
    columns.high.extend(highs[0] if len(highs) == 1 else map(max, *highs))
    columns.mean.extend(means[0] if len(means) == 1 else _averages(means))


def _averages(columns: list[array[float]]) -> list[float]:
    """The mean of each row; all bins hold the same number of lines."""
    count = len(columns)
    totals = list(map(sum, zip(*columns, strict=True)))
    if all(map(math.isfinite, totals)):
        return [total / count for total in totals]
    return [math.fsum(value / count for value in row) for row in zip(*columns, strict=True)]
