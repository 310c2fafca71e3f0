"""The curves of one job, as far as they were read. One index is shared by all feeds of this process."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from ..protocol.disk import size_of
from ..protocol.paths import JobPaths
from ..store import metrics
from ..store.segments import read
from .bins import MOST, Bins, Rows, number
from .merging import Merging

NAMES = 1000
"""Largest number of curves kept for one job."""

LONGEST_NAME = 200
"""Longest name of a curve in characters."""

CELLS = 1_500_000
"""Largest number of bins of all curves of all ranks together (about 32 bytes each)."""

CHUNK = 64 * 1024
LONGEST = 1024 * 1024
"""Longest line in bytes; longer lines are skipped."""

_TOGETHER = 64
"""Largest number of name sets with bins of their own (names logged together). Other names get bins one by one."""
_ROUTES = 4096
_BARS = 16
_PEEK = 64 * 1024
_SAMPLES = 64
_SAMPLE = 4 * 1024
_FAR = 1e300
"""Steps and times beyond this are ignored, so that the difference of two is finite."""

_scan = json.JSONDecoder(parse_constant=lambda text: "@nan").scan_once  # type: ignore[attr-defined]

Route = list[tuple[Bins, tuple[int, ...] | None]]


@dataclass
class Names:
    """Which curves are kept: the first ``NAMES``."""

    kept: dict[str, None] = field(default_factory=dict)
    left: bool = False
    """Whether some curves were not kept."""

    @property
    def note(self) -> str:
        """A sentence about curves that are not kept; empty if all are kept."""
        return f"more than {NAMES} curves, or very long names: the first {NAMES} are shown" if self.left else ""

    def admits(self, name: str) -> bool:
        if name in self.kept:
            return True
        if len(self.kept) >= NAMES or len(name) > LONGEST_NAME or not _is_text(name):
            self.left = True
            return False
        self.kept[name] = None
        return True


def _is_text(name: str) -> bool:
    """Whether a browser can take it: half a surrogate pair is none."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


class RankCurves:
    """The curves of one rank, read from its file from ``offset`` on."""

    def __init__(self, path: Path, names: Names, offset: int = 0) -> None:
        self.path, self.offset = path, offset
        self.by_names: dict[tuple[str, ...], Bins] = {}
        self.step: int | None = None
        self._says_steps = False
        """Whether user code gives steps; else the longest curve is counted, as it is drawn."""
        self.last: dict[str, float] = {}
        self.bars: dict[Any, dict[str, Any]] = {}
        self.samples: int | None = None
        self.points = 0
        self._names = names
        self._routes: dict[tuple[str, ...], Route] = {}
        self._skipping = False
        self._latest: dict[tuple[str, ...], dict[str, Any]] = {}
        self._expected: dict[tuple[str, ...], int] = {}
        """Estimated number of lines for each set of names in a long file."""

    def size(self) -> int:
        return size_of(self.path)

    def peek(self) -> None:
        """Read the last values of a long file before the rest, and estimate its content."""
        size = self.size()
        if size > 4 * _PEEK:
            head, _, data = read(self.path, size - _PEEK, size).partition(b"\n")
            for _, record in _records(data, size - _PEEK + len(head) + 1):
                self._note(record)
            self._keep_last()
            self._estimate(size)

    def _estimate(self, size: int) -> None:
        """Sample a few places of the file. Bins that are wide from the beginning need not be joined repeatedly."""
        seen: Counter[tuple[str, ...]] = Counter()
        places = range(0, size - _SAMPLE, size // _SAMPLES)
        for place in places:
            data = read(self.path, place, place + _SAMPLE).partition(b"\n")[2]
            data = data[: data.rfind(b"\n") + 1]
            logged = (record.get("v") for _, record in _records(data, 0) if record.get("k") == "log")
            seen.update(tuple(values) for values in logged if isinstance(values, dict))
        self._expected = {names: count * size // (len(places) * _SAMPLE) for names, count in seen.items()}

    def advance(self, end: int, most: int = MOST) -> bool:
        """Read a piece before ``end``. Returns whether it had a complete line (or part of a line that is too long)."""
        data = read(self.path, self.offset, min(end, self.offset + CHUNK))
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) == CHUNK:
            data = read(self.path, self.offset, min(end, self.offset + LONGEST))
            whole = data.rfind(b"\n") + 1
            if not whole and len(data) == LONGEST:
                self._skipping = True
                self.offset += len(data)
                return True
        if not whole:
            return False
        begin = data.index(b"\n") + 1 if self._skipping else 0
        self._skipping = False
        self._take(data[begin:whole], self.offset + begin, most)
        self.offset += whole
        return True

    def _take(self, data: bytes, offset: int, most: int) -> None:
        batches: dict[int, tuple[Bins, Rows]] = {}
        for where, record in _records(data, offset):
            values = self._note(record)
            if values:
                self._sort_in(batches, record, values, where)
        self._keep_last()
        for bins, rows in batches.values():
            bins.add(rows, most)
            self.points += len(rows.x)

    def _note(self, record: dict[str, Any]) -> dict[str, Any] | None:
        """Keep what the status shows. Returns the values if the line logs values, else None."""
        kind, values = record.get("k"), record.get("v")
        if kind == "log" and isinstance(values, dict):
            if isinstance(step := record.get("step"), int):
                self.step, self._says_steps = step, True
            names = tuple(values)
            self._latest.pop(names, None)
            self._latest[names] = values
            return values
        if kind == "samples" and isinstance(record.get("n"), int):
            self.samples = record["n"]
        if kind == "progress" and isinstance(bar := record.get("id"), (int, str)):
            if bar not in self.bars and len(self.bars) >= _BARS:
                self.bars.pop(next(iter(self.bars)))
            self.bars[bar] = record
        return None

    def _keep_last(self) -> None:
        for values in self._latest.values():
            self.last.update((name, number(value)) for name, value in values.items() if self._names.admits(name))
        self._latest.clear()

    def _sort_in(
        self, batches: dict[int, tuple[Bins, Rows]], record: dict[str, Any], values: dict[str, Any], where: int
    ) -> None:
        t, step = record.get("t"), record.get("step")
        if not isinstance(t, (int, float)) or not -_FAR < t < _FAR:
            return
        row = tuple(values.values())
        for bins, chosen in self._route(tuple(values)):
            x = _step(step, bins.lines)
            bins.lines += 1
            if not self._says_steps:
                self.step = max(self.step or 0, int(x))
            if not self._wants(x, t):
                continue
            _, rows = batches.setdefault(id(bins), (bins, Rows()))
            rows.x.append(x)
            rows.t.append(t)
            rows.where.append(where)
            rows.values.append(row if chosen is None else tuple(row[index] for index in chosen))

    def _wants(self, x: float, t: float) -> bool:
        return True

    def _route(self, names: tuple[str, ...]) -> Route:
        route = self._routes.get(names)
        if route is None:
            route = self._new_route(names)
            if len(self._routes) < _ROUTES:
                self._routes[names] = route
        return route

    def _new_route(self, names: tuple[str, ...]) -> Route:
        kept = self._kept(names)
        if not kept:
            return []
        together = tuple(names[index] for index in kept)
        if together in self.by_names or len(self.by_names) < _TOGETHER:
            per = self._per(self._expected.get(names, 0))
            return [(self._bins(together, per), None if len(kept) == len(names) else kept)]
        return [(self._bins((names[index],)), (index,)) for index in kept]

    def _kept(self, names: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(index for index, name in enumerate(names) if self._names.admits(name))

    def _per(self, expected: int) -> int:
        """Lines per bin: rather too few than too many, because bins can be joined but not split."""
        per = 1
        while expected > 2 * MOST * per:
            per *= 2
        return per

    def _bins(self, names: tuple[str, ...], per: int = 1) -> Bins:
        if names not in self.by_names:
            self.by_names[names] = Bins(names, per=per)
        return self.by_names[names]


class Closer(RankCurves):
    """Reads the lines behind some bins of ``whole`` again, for the names ``wanted``."""

    def __init__(
        self,
        whole: RankCurves,
        bins: Bins,
        inside: range,
        wanted: frozenset[str],
        asked: Callable[[float, float], bool],
    ) -> None:
        """``inside``: indices of the bins that overlap the range. ``asked(step, time)``: whether a line is in it."""
        super().__init__(whole.path, whole._names, bins.where[inside[0]])
        last = inside[-1] + 1
        self.end = bins.where[last] if last < len(bins) else whole.offset
        self.of = bins.names
        self._elsewhere = whole.by_names.keys() - {bins.names}
        self._asked = asked
        names = tuple(name for name in bins.names if name in wanted)
        self.bins = Bins(names, first=sum(bins.count[: inside[0]]))

    def _wants(self, x: float, t: float) -> bool:
        return self._asked(x, t)

    def _new_route(self, names: tuple[str, ...]) -> Route:
        together = tuple(names[index] for index in self._kept(names))
        alone = len(self.of) == 1 and self.of[0] in together and together not in self._elsewhere
        if together != self.of and not alone:
            return []
        return [(self.bins, tuple(names.index(name) for name in self.bins.names))]


def _records(data: bytes, offset: int) -> list[tuple[int, dict[str, Any]]]:
    """(offset, record) of each line; damaged lines are skipped.

    The codec is too slow for millions of numbers. So tagged numbers remain strings here (see ``bins.number``).
    """
    found = []
    for line in data.decode("latin-1").split("\n"):
        try:
            record, _ = _scan(line, 0)
        except (StopIteration, ValueError, RecursionError):
            record = None
        if type(record) is dict:
            found.append((offset, record))
        offset += len(line) + 1
    return found


def _step(step: Any, count: int) -> float:
    """The step as a number; if no step was given, the number of lines before."""
    if isinstance(step, (int, float, str)):
        x = number(step)
        if -_FAR < x < _FAR:
            return x
    return float(count)


class CurveIndex:
    """The curves of all ranks. Thread-safe; every call is short."""

    _shared: ClassVar[WeakValueDictionary[Path, CurveIndex]] = WeakValueDictionary()
    _sharing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, paths: JobPaths) -> None:
        self.lock = threading.RLock()
        self.names = Names()
        self.ranks: dict[int, RankCurves] = {}
        self.merging = Merging()
        self._paths = paths

    @staticmethod
    def of(paths: JobPaths) -> CurveIndex:
        """The index of this process for the job."""
        with CurveIndex._sharing:
            index = CurveIndex._shared.get(paths.root)
            if index is None:
                index = CurveIndex._shared[paths.root] = CurveIndex(paths)
            return index

    @property
    def version(self) -> int:
        """Increases with every line that is read."""
        return sum(rank.points for rank in self.ranks.values())

    @property
    def most(self) -> int:
        """Number of bins that one curve of one rank may have now."""
        return max(16, min(MOST, CELLS // max(1, len(self.names.kept) * len(self.ranks))))

    def advance(self, seconds: float) -> bool:
        """Read for ``seconds``, beginning with the rank that is furthest behind. Returns whether everything is read."""
        until = time.monotonic() + seconds
        if not self.lock.acquire(blocking=False):
            return False  # another feed is reading
        try:
            sizes = {rank: curves.size() for rank, curves in self.ranks.items()}
            waiting = {rank for rank, size in sizes.items() if size > self.ranks[rank].offset}
            while waiting and time.monotonic() < until:
                rank = min(waiting, key=lambda rank: self.ranks[rank].offset)
                curves = self.ranks[rank]
                if not curves.advance(sizes[rank], self.most) or curves.offset >= sizes[rank]:
                    waiting.discard(rank)
            return not waiting
        finally:
            self.lock.release()

    def look(self) -> None:
        """Find the files of ranks that have begun to log. Of a long file, the last values are read at once."""
        found = metrics.files(self._paths)
        with self.lock:
            for rank, path in found.items():
                if rank not in self.ranks:
                    self.ranks[rank] = RankCurves(path, self.names)
                    self.ranks[rank].peek()
