"""The points of a job from where its tracker is: the curves of all ranks, then what its ranks take of their nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..protocol.gauges import Gauges
from ..protocol.paths import JobPaths
from ..protocol.plan import Plan
from ..store import gauges, metrics
from .base import Point

CHUNK = 64 * 1024
"""Bytes of one file that are read at a time: some thousand points."""

MEASURED = {"cpu": "cpu_percent", "memory": "memory_bytes", "gpu": "gpu_percent", "gpu_memory": "gpu_memory_bytes"}
"""Gauges that are system metrics, and what they are called there."""


@dataclass(frozen=True)
class Portion:
    """Points of one file up to ``end``, which begins at ``file``'s known offset. ``counts`` as in ``Tracking``."""

    file: str
    end: int
    points: list[Point]
    counts: dict[str, int]


class Reading:
    """``begun``: when the job was submitted, in seconds since the epoch; steps of system metrics count from there."""

    def __init__(self, paths: JobPaths, plan: Plan, begun: float) -> None:
        self._paths, self._begun = paths, begun
        self._hosts = {rank: node.called for node in plan.nodes for rank in node.ranks}

    def portions(self, at: Mapping[str, int], counts: Mapping[str, int]) -> Iterator[Portion]:
        """All points after the offsets ``at``, a file after the other."""
        counts = dict(counts)
        for rank, path in metrics.files(self._paths).items():
            begin = at.get(path.name, 0)
            while (read := metrics.read_file(path, begin, CHUNK))[1] > begin:
                records, begin = read
                points = list(_curves(rank, records, counts))
                yield Portion(path.name, begin, points, dict(counts))
        file = self._paths.measured.name
        begin = at.get(file, 0)
        while (history := gauges.history(self._paths, begin))[1] > begin:
            lines, begin = history
            yield Portion(file, begin, [point for t, told in lines for point in self._system(t, told)], dict(counts))

    def _system(self, t: float, told: Mapping[int, Gauges]) -> Iterator[Point]:
        for rank, taken in told.items():
            for field, name in MEASURED.items():
                value = getattr(taken, field)
                if value is not None and rank in self._hosts:
                    step = max(0, round(t - self._begun))
                    yield Point(f"system/{self._hosts[rank]}/rank_{rank}/{name}", float(value), step, t)


def _curves(rank: int, records: list[dict[str, Any]], counts: dict[str, int]) -> Iterator[Point]:
    """Curves of rank 0 have their own names, those of another rank a directory. User code may write anything here."""
    for record in records:
        t, step, values = record.get("t"), record.get("step"), record.get("v")
        if record.get("k") != "log" or not isinstance(values, dict) or not isinstance(t, (int, float)):
            continue
        for name, value in values.items():
            curve = name if rank == 0 else f"rank_{rank}/{name}"
            following = step if isinstance(step, int) else counts.get(curve, 0)
            if isinstance(value, (int, float)) and abs(following) < 2**53:
                counts[curve] = following + 1
                yield Point(curve, _double(value), following, float(t))


def _double(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
