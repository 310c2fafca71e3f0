"""Whether the ranks of a node make progress, or at least work. Seen from outside: a rank may hold the GIL forever.

*Progress* is a collective that was entered or ended, output, a value of a curve, a step of the rank's life. *Work* is
time of the processor or data that is read and written, of a rank that does not wait in a collective: NCCL spins there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..protocol.disk import read_records, size_of
from ..protocol.paths import NodePaths

MEASURED = 3
"""Of so many measurements, a rank that works has worked in most: what wakes up now and then is no work."""

KNOWN_SECONDS = 10.0
"""A rank that was not measured for this time may be at work."""

Quiet = tuple[int, float, float]
"""A rank; seconds since it made progress; seconds since it made progress or worked."""


@dataclass
class _Sign:
    progress: float
    work: float
    marks: tuple[int, ...] = ()
    waits: bool = False
    measured: float = float("-inf")
    works: deque[bool] = field(default_factory=lambda: deque(maxlen=MEASURED))

    def may_work(self, now: float) -> bool:
        known = self.works and now - self.measured <= KNOWN_SECONDS
        return not known or 2 * sum(self.works) > len(self.works)


class Progress:
    """The ranks of one node. ``now`` is in seconds on a monotonic clock."""

    def __init__(self, files: NodePaths, ranks: Sequence[int]) -> None:
        self._files, self._ranks = files, tuple(ranks)
        self._signs: dict[int, _Sign] = {}

    def lives(self, rank: int, now: float) -> None:
        """The rank has reported a step of its life."""
        sign = self._signs.setdefault(rank, _Sign(now, now))
        sign.progress = sign.work = now
        sign.works.clear()  # what it does from now on is something else

    def waits(self, rank: int, waits: bool) -> None:
        """The rank has reported that it waits in a collective, or does so no more."""
        if sign := self._signs.get(rank):
            sign.waits = waits

    def measured(self, rank: int, works: bool, now: float) -> None:
        """The rank has worked since the last measurement, or it has not."""
        if sign := self._signs.get(rank):
            sign.measured = now
            sign.works.append(works)

    def look(self, ranks: Iterable[int], now: float) -> list[Quiet]:
        """How long each of ``ranks`` has made no progress, and has not even worked."""
        tally = read_records(self._files.tally, 8, self._ranks)
        found = []
        for rank in ranks:
            sign = self._signs.setdefault(rank, _Sign(now, now))
            marks = (int.from_bytes(tally.get(rank, b""), "little"), *self._sizes(rank))
            if marks != sign.marks:
                sign.marks, sign.progress, sign.work = marks, now, now
            if not sign.waits and sign.may_work(now):
                sign.work = now
            found.append((rank, now - sign.progress, now - max(sign.progress, sign.work)))
        return found

    def _sizes(self, rank: int) -> list[int]:
        """The sizes of what the rank writes."""
        files = self._files
        return [size_of(path) for path in (files.out(rank), files.err(rank), files.metrics(rank), files.display(rank))]
