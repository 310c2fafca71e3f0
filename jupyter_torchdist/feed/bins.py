"""Curves that are logged together, folded into a bounded number of bins as they arrive. Extreme values are kept."""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

MOST = 2048
"""Largest number of bins of one curve of one rank."""


def number(value: Any) -> float:
    """A logged value, in the form used in the file, as a float. A value that is no finite number becomes NaN or inf."""
    if isinstance(value, str):
        value = _TAGGED.get(value, value)
        if isinstance(value, str):
            return _integer(value)
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return math.nan


_TAGGED = {"@nan": math.nan, "@inf": math.inf, "@-inf": -math.inf}


def _integer(text: str) -> float:
    try:
        return number(int(text[5:])) if text.startswith("@int:") else math.nan
    except ValueError:
        return math.nan


@dataclass
class Rows:
    """Lines of the file that log the same names: one row of values per line, unchanged."""

    x: list[float] = field(default_factory=list)
    t: list[float] = field(default_factory=list)
    where: list[int] = field(default_factory=list)
    """Offset of each line in the file."""
    values: list[Sequence[Any]] = field(default_factory=list)


@dataclass
class Cells:
    """The bins of one curve. If a bin has no finite value (``finite`` is 0), ``low`` is +inf and ``high`` is -inf."""

    low: array[float] = field(default_factory=lambda: array("d"))
    high: array[float] = field(default_factory=lambda: array("d"))
    mean: array[float] = field(default_factory=lambda: array("d"))
    finite: array[float] = field(default_factory=lambda: array("d"))
    gaps: bool = False
    """Whether any value was not finite."""

    def append(self, column: Sequence[Any]) -> None:
        low, high, mean, finite = measure(column)
        self.gaps = self.gaps or finite < len(column)
        self.low.append(low)
        self.high.append(high)
        self.mean.append(mean)
        self.finite.append(finite)

    def extend_last(self, column: Sequence[Any]) -> None:
        low, high, mean, finite = measure(column)
        self.gaps = self.gaps or finite < len(column)
        self.low[-1] = min(self.low[-1], low)
        self.high[-1] = max(self.high[-1], high)
        self.mean[-1] = joined(self.mean[-1], self.finite[-1], mean, finite)
        self.finite[-1] += finite

    def halve(self) -> None:
        self.mean = array("d", _pairs_joined(self.mean, self.finite))
        self.low, self.high = _halved(min, self.low), _halved(max, self.high)
        self.finite = _halved(operator.add, self.finite)


def measure(column: Sequence[Any]) -> tuple[float, float, float, int]:
    """Minimum, maximum, mean and number of the finite values in ``column``."""
    try:
        total = sum(column)
        if math.isfinite(total):
            return min(column), max(column), total / len(column), len(column)
    except (TypeError, OverflowError):
        pass  # a value is not a number, or too large for a double
    values = [value for item in column if math.isfinite(value := number(item))]
    if not values:
        return math.inf, -math.inf, 0.0, 0
    return min(values), max(values), math.fsum(value / len(values) for value in values), len(values)


def joined(mean: float, count: float, other: float, others: float) -> float:
    """The mean of two parts. Divides before it multiplies, so that no product overflows a double."""
    total = count + others
    return mean * (count / total) + other * (others / total) if total else 0.0


def _pairs_joined(mean: array[float], finite: array[float]) -> Iterable[float]:
    found = list(map(joined, mean[::2], finite[::2], mean[1::2], finite[1::2]))
    return found if len(mean) % 2 == 0 else [*found, mean[-1]]


def _halved(join: Any, values: array[Any]) -> array[Any]:
    found = array(values.typecode, map(join, values[::2], values[1::2]))
    if len(values) % 2:
        found.append(values[-1])
    return found


class Bins:
    """Bins over the lines that log ``names``. Each bin holds ``per`` lines. When there are too many, pairs are joined.

    A step that goes backwards begins a new bin.
    """

    def __init__(self, names: tuple[str, ...], first: int = 0, per: int = 1) -> None:
        """``first``: number of earlier lines. If no step is given, x is the number of lines before."""
        self.names = names
        self.lines = first
        self.per = per
        self.x, self.x_low, self.x_end = array("d"), array("d"), array("d")
        """Per bin: x of its first line, smallest x, largest x. Joined pairs may contain a step that goes backwards."""
        self.t, self.t_low, self.t_end = array("d"), array("d"), array("d")
        self.where = array("q")
        self.count: array[Any] = array("q")
        self.cells = [Cells() for _ in names]
        self.in_order = True
        """Whether neither steps nor times go backwards from one bin to the next."""

    def __len__(self) -> int:
        return len(self.count)

    def inside(self, axis: str, low: float, high: float) -> list[int]:
        """Indices of the bins with lines from ``low`` to ``high`` on ``axis`` (``step`` or ``time``), in file order."""
        least, greatest = (self.x_low, self.x_end) if axis == "step" else (self.t_low, self.t_end)
        reaches = zip(least, greatest, strict=True)
        return [number for number, (begin, end) in enumerate(reaches) if begin <= high and end >= low]

    def add(self, rows: Rows, most: int = MOST) -> None:
        """Fold in lines, which must be in file order. Keeps at most about ``most`` bins."""
        for begin, end in _runs(rows.x):
            while begin < end:
                begin = self._add_run(rows, begin, end, most)

    def _add_run(self, rows: Rows, begin: int, end: int, most: int) -> int:
        """Fold lines from ``begin`` on into one bin. Returns the index of the first line that is left."""
        room = self.per - self.count[-1] if self.count else 0
        if room <= 0 or rows.x[begin] < self.x_end[-1]:
            while len(self) >= max(2, most):
                self._halve()
            return self._new(rows, begin, min(end, begin + self.per))
        stop = min(end, begin + room)
        self.x_end[-1] = max(self.x_end[-1], rows.x[stop - 1])
        self.t_low[-1] = min(self.t_low[-1], *rows.t[begin:stop])
        self.t_end[-1] = max(self.t_end[-1], *rows.t[begin:stop])
        self.count[-1] += stop - begin
        for cells, column in zip(self.cells, zip(*rows.values[begin:stop], strict=True), strict=True):
            cells.extend_last(column)
        return stop

    def _new(self, rows: Rows, begin: int, end: int) -> int:
        if self.x and (rows.x[begin] < self.x[-1] or rows.t[begin] < self.t[-1]):
            self.in_order = False
        self.x.append(rows.x[begin])
        self.x_low.append(rows.x[begin])
        self.x_end.append(rows.x[end - 1])
        self.t.append(rows.t[begin])
        self.t_low.append(min(rows.t[begin:end]))
        self.t_end.append(max(rows.t[begin:end]))
        self.where.append(rows.where[begin])
        self.count.append(end - begin)
        for cells, column in zip(self.cells, zip(*rows.values[begin:end], strict=True), strict=True):
            cells.append(column)
        return end

    def _halve(self) -> None:
        self.per *= 2
        self.x, self.t, self.where = self.x[::2], self.t[::2], self.where[::2]
        self.x_low, self.t_low = _halved(min, self.x_low), _halved(min, self.t_low)
        self.x_end, self.t_end = _halved(max, self.x_end), _halved(max, self.t_end)
        self.count = _halved(operator.add, self.count)
        for cells in self.cells:
            cells.halve()


def _runs(x: list[float]) -> list[tuple[int, int]]:
    """Index ranges of ``x`` whose values do not go backwards."""
    if not any(map(operator.gt, x, x[1:])):
        return [(0, len(x))]
    breaks = [index + 1 for index, (one, next_) in enumerate(pairwise(x)) if one > next_]
    return list(pairwise([0, *breaks, len(x)]))
