"""What the profiler of a rank saw, as lines from which the client makes the timeline of all ranks.

The file is gzip. A line is the microseconds since the profile's origin, a tab, and the rest of one event of the Trace
Event Format: an object's text after its ``{``. Process and flow numbers are of this rank alone.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .shares import is_collective

STEPS = "steps"
"""The name of the row of steps."""

COLLECTIVES = 1_000_000
"""The first row of collectives, which have rows of their own."""

_QUICK = 1
"""gzip's level: the training waits meanwhile."""


def read(path: Path, origin: int) -> list[dict[str, Any]]:
    """The events that torch's profiler wrote. ``ts`` and ``dur`` are microseconds, ``ts`` since ``origin``."""
    trace = json.loads(path.read_bytes())
    offset = (trace.get("baseTimeNanoseconds", 0) - 1000 * origin) / 1000  # first in whole numbers, which are exact
    events = [event for event in trace["traceEvents"] if isinstance(event.get("ts", 0), (int, float))]
    for event in events:
        event["ts"] = event.get("ts", 0) + offset
    return events


def write(path: Path, events: Sequence[dict[str, Any]], marks: Sequence[float], unit: str) -> int:
    """The rank's lines; returns the file's size in bytes. ``marks``: the ends of steps, as ``ts`` of the events."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=_QUICK, mtime=0) as file:
        for event in (*_steps(marks, unit), *_renumbered(events)):
            ts = event.pop("ts", 0.0)
            file.write(f"{ts:.3f}\t{json.dumps(event, separators=(',', ':'))[1:]}\n".encode())
    return path.stat().st_size


def _steps(marks: Sequence[float], unit: str) -> Iterator[dict[str, Any]]:
    """A row of its own, above the threads."""
    yield from _row(0, STEPS, -2)
    for number, (begin, end) in enumerate(itertools.pairwise(marks)):
        name = f"step {number}" if number else "warm-up"
        yield {"ph": "X", "name": name, "cat": "step", "ts": begin, "dur": end - begin, "tid": 0, "args": {"end": unit}}


def _renumbered(events: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """In order of time, without processes: threads, GPU streams and flows count from 1."""
    rows: dict[tuple[Any, Any], int] = {}
    flows: dict[Any, int] = {}
    ends: list[float] = []
    for event in sorted(events, key=lambda event: float(event["ts"])):
        phase, category = event.get("ph"), event.get("cat")
        if phase == "M" and event.get("name") != "thread_name":
            continue
        if phase not in ("X", "M", "s", "f", "t") or category == "Trace":
            continue
        row = event.pop("pid", 0), event.get("tid")
        if is_collective(event):
            event["tid"] = COLLECTIVES + _lane(ends, event["ts"], event["ts"] + event.get("dur", 0))
        else:
            event["tid"] = rows.setdefault(row, len(rows) + 1)
        if phase in ("s", "f", "t"):
            event["id"] = flows.setdefault((category, event.get("id")), len(flows) + 1)
        yield event
    for lane in range(len(ends)):
        yield from _row(COLLECTIVES + lane, "collectives", -1)


def _row(number: int, name: str, place: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "thread_name", "tid": number, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_sort_index", "tid": number, "args": {"sort_index": place}}


def _lane(ends: list[float], begin: float, end: float) -> int:
    """A row in which nothing else goes on: collectives overlap, and a viewer shows only what is nested."""
    lane = next((lane for lane, last in enumerate(ends) if last <= begin), len(ends))
    ends[lane : lane + 1] = [end]
    return lane
