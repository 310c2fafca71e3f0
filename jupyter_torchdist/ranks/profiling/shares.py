"""On what a rank spends its steps, from the events of torch's profiler.

With a GPU, compute and communication are kernels and copies on it. Without one they are operations of this process, and
the time from the start of a collective to its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

Span = tuple[float, float]

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what a GPU does."""

_COLLECTIVE = re.compile(r"(gloo|nccl|mpi|ucc|xccl|hccl):")
_COLLECTIVE_KERNEL = re.compile(r"nccl|rccl|oneccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", re.IGNORECASE)
_ENTERS = ("c10d::", "_c10d_functional::", "c10d_functional::")
_LOADING = "enumerate(DataLoader)"


def shares(events: Iterable[dict[str, Any]], window: Span, thread: int) -> dict[str, float]:
    """Microseconds within ``window``: compute, communication, overlap of both, loading, and idle for the rest.

    ``loading`` is the time in which ``thread``, which runs user code, waits for a ``DataLoader``.
    """
    found: dict[str, list[Span]] = {"gpu": [], "gpu_collective": [], "cpu": [], "collective": [], "enters": []}
    loads: list[Span] = []
    for event in events:
        if event.get("ph") != "X":
            continue
        begin = float(event["ts"])
        span = max(begin, window[0]), min(begin + float(event.get("dur", 0)), window[1])
        if span[0] >= span[1]:
            continue
        name = str(event.get("name", ""))
        if name.startswith(_LOADING) and event.get("tid") == thread:
            loads.append(span)
        elif kind := _kind(str(event.get("cat", "")), name):
            found[kind].append(span)
    loading = union(loads)
    if found["gpu"] or found["gpu_collective"]:
        compute, communication = union(found["gpu"]), union(found["gpu_collective"])
    else:
        compute = without(union(found["cpu"]), union([*found["enters"], *loading]))
        communication = union(found["collective"])
    both = length(compute) + length(communication) - length(union([*compute, *communication]))
    busy = length(union([*compute, *communication, *loading]))
    return {
        "compute": length(compute),
        "communication": length(communication),
        "overlap": both,
        "loading": length(loading),
        "idle": window[1] - window[0] - busy,
    }


def _kind(category: str, name: str) -> str:
    if category in ON_GPU:
        return "gpu_collective" if category == "kernel" and _COLLECTIVE_KERNEL.search(name) else "gpu"
    if category == "cpu_op":
        return "enters" if name.startswith(_ENTERS) else "cpu"
    return "collective" if category == "user_annotation" and _COLLECTIVE.match(name) else ""


def is_collective(event: dict[str, Any]) -> bool:
    """Whether the event is a collective, from the call of the rank to its end."""
    return event.get("ph") == "X" and _kind(str(event.get("cat", "")), str(event.get("name", ""))) == "collective"


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that do not meet, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """``spans`` less the time of ``holes``; both as ``union`` gives them."""
    found: list[Span] = []
    at = 0
    for begin, end in spans:
        while at < len(holes) and holes[at][1] <= begin:
            at += 1
        here = at
        while here < len(holes) and holes[here][0] < end:
            if holes[here][0] > begin:
                found.append((begin, holes[here][0]))
            begin = max(begin, holes[here][1])
            here += 1
        if begin < end:
            found.append((begin, end))
    return found


def length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)
