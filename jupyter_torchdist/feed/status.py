"""The status message, which changes often: progress, steps, last values, and gauges of the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..protocol.events import Finding
from ..protocol.feed import Progress, RankStatus, Status
from ..protocol.gauges import Gauges, Traffic
from ..store.tracking import Tracking
from .bins import number
from .curveindex import CurveIndex, RankCurves

VALUES = 2000
"""Largest number of last values in one message. With many ranks, only the first curves of each rank are sent."""


def of(
    effective: str,
    index: CurveIndex,
    gauges: Mapping[int, Gauges],
    tracked: Sequence[Tracking] = (),
    findings: Sequence[Finding] = (),
    network: Mapping[str, Mapping[str, Traffic]] = MappingProxyType({}),
) -> Status:
    """The ``status`` message. ``curves.note`` is a sentence if some curves are left out, else empty."""
    with index.lock:
        each = max(1, VALUES // max(1, len(index.ranks)))
        ranks = {str(rank): _rank(curves, each) for rank, curves in sorted(index.ranks.items())}
        return {
            "effective": effective,
            "progress": progress(index),
            "ranks": ranks,
            "curves": {"version": index.version, "names": list(index.names.kept), "note": index.names.note},
            "samples": samples(index),
            "findings": [finding.to_json() for finding in findings],
            "gauges": {str(rank): taken.to_json() for rank, taken in sorted(gauges.items())},
            "network": {
                node: {name: traffic.to_json() for name, traffic in interfaces.items()}
                for node, interfaces in sorted(network.items())
            },
            "tracked": [{"tracker": one.tracker, "link": one.link, "said": one.said} for one in tracked],
        }


def _rank(curves: RankCurves, each: int) -> RankStatus:
    return {"step": curves.step, "last": dict(list(curves.last.items())[:each])}


def progress(index: CurveIndex) -> Progress | None:
    """The progress bar of the rank that is furthest behind: what a job has done is what all its ranks have."""
    bars = [bar for _, curves in sorted(index.ranks.items()) if (bar := _bar(curves)) is not None]
    return min(bars, key=_share, default=None)


def samples(index: CurveIndex) -> float | None:
    """How many samples all ranks have trained with."""
    return sum_of(curves.samples for curves in index.ranks.values())


def sum_of(counts: Iterable[int | None]) -> float | None:
    """Of the counts that are known, and can be; None: of none."""
    known = [count for count in counts if count is not None and 0 <= count < 2**53]
    return float(sum(known)) if known else None


def _bar(curves: RankCurves) -> Progress | None:
    """A rank's outermost unfinished bar, else its last bar."""
    bars = list(curves.bars.values())
    if not bars:
        return None
    running = [bar for bar in bars if bar.get("total") is None or bar.get("n") != bar.get("total")]
    bar = running[0] if running else bars[-1]
    return {
        "desc": str(bar.get("desc", ""))[:200],
        "n": _count(bar.get("n")) or 0,
        "total": _count(bar.get("total")),
    }


def _share(bar: Progress) -> float:
    return bar["n"] / bar["total"] if bar["total"] else bar["n"]


def _count(value: Any) -> float | None:
    if value is None:
        return None
    found = number(value)
    return found if abs(found) < 2**53 else None
