"""The ranks' curves and progress for the still picture, from the curve index that this process's feeds share."""

from __future__ import annotations

import math
import time

from ..feed import curves, status
from ..feed.curveindex import CurveIndex
from ..protocol.feed import CurvesAsked
from ..protocol.paths import JobPaths
from .picture import Trace
from .snapshot import CURVES, Progress

POINTS = 120
"""The largest number of points of a drawn curve: one for two pixels of its picture."""
SHARE = 25
"""Reading takes 1/``SHARE`` of the time that has passed, if no view has read the curves already."""
LEAST, MOST = 0.005, 0.1
"""Limits in seconds for one reading, during which the waiting cell handles no interrupt."""
CATCH_UP = 1.0
"""Limit in seconds for reading to the end when the job has ended."""


class Curves:
    """Last value and points of each curve, and the progress: rank 0's if it reports one, else the lowest rank's."""

    def __init__(self, paths: JobPaths) -> None:
        self._index = CurveIndex.of(paths)
        self._polled = time.monotonic()

    @property
    def last(self) -> dict[str, float]:
        """Curve -> its last value, in the order in which the curves appeared."""
        index, found = self._index, dict[str, float]()
        with index.lock:
            for _, rank in sorted(index.ranks.items(), reverse=True):
                found.update(rank.last)
            return {name: found[name] for name in index.names.kept if name in found}

    @property
    def traces(self) -> dict[str, Trace]:
        """Curve -> its drawn points, for the first ``CURVES`` curves with more than one point."""
        with self._index.lock:
            names = list(self._index.names.kept)
        found: dict[str, Trace] = {}
        for name in names:
            if len(found) < CURVES and (trace := self._trace(name)) is not None:
                found[name] = trace
        return found

    @property
    def progress(self) -> Progress | None:
        """The bar, if any rank has one."""
        with self._index.lock:
            bar = status.progress(self._index)
        return Progress(bar["n"], bar["total"] or None, bar["desc"]) if bar else None

    def poll(self) -> int:
        """Read new records, as many as the time allows. Returns a number that grows with them."""
        now = time.monotonic()
        return self._read(min(MOST, max(LEAST, (now - self._polled) / SHARE)))

    def read_to_end(self) -> None:
        """Read all records within ``CATCH_UP`` seconds; the last values are read in any case."""
        self._read(CATCH_UP)
        with self._index.lock:
            for rank in self._index.ranks.values():
                if rank.offset < rank.size():
                    rank.peek()

    def _read(self, seconds: float) -> int:
        self._index.look()
        self._index.advance(seconds)
        self._polled = time.monotonic()
        with self._index.lock:
            return sum(rank.offset for rank in self._index.ranks.values())

    def _trace(self, name: str) -> Trace | None:
        asked = CurvesAsked("band", (name,), width=POINTS)
        series = _whole(curves.answer(self._index, asked))["series"]
        trace = Trace(*(tuple(series[0][key]) for key in curves.COLUMNS))
        return trace if sum(map(math.isfinite, trace.mean)) > 1 else None


def _whole(work: curves.Work) -> curves.Answer:
    """Run the generator to its end and return the answer."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            answer: curves.Answer = end.value
            return answer
