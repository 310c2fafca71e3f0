"""CPU, memory and GPU use of a job's ranks, read from the files that agents wrote (``node/gauges``)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from ..protocol import codec
from ..protocol.disk import open_plain
from ..protocol.gauges import NETWORK, Gauges, Traffic
from ..protocol.paths import JobPaths, is_safe
from . import metrics

_MOST = 4 * 1024 * 1024
"""Largest number of bytes read from one node's file: each rank needs some hundred bytes."""


def read(paths: JobPaths) -> dict[int, Gauges]:
    """Gauges by rank; empty for a job that ended quickly, or that an earlier version ran."""
    files = GaugeFiles(paths)
    files.look()
    return files.latest


class GaugeFiles:
    """The gauges files of all nodes. Only files that were replaced are read again."""

    def __init__(self, paths: JobPaths) -> None:
        self._paths = paths
        self._nodes: dict[str, tuple[tuple[int, int], Any]] = {}
        self.latest: dict[int, Gauges] = {}
        """Gauges by rank, as read by the last ``look``."""
        self.network: dict[str, dict[str, Traffic]] = {}
        """By node and interface."""

    def look(self) -> None:
        changed = [self._look_at(name) for name in self._names()]
        if any(changed):
            files = {name: value for name, (_, value) in self._nodes.items()}
            self.latest = {rank: gauges for value in files.values() for rank, gauges in _by_rank(value).items()}
            self.network = {name: Traffic.of_host(value.get(NETWORK)) for name, value in files.items()}

    def _names(self) -> list[str]:
        try:
            return sorted(entry.name for entry in os.scandir(self._paths.nodes) if is_safe(entry.name))
        except OSError:
            return []

    def _look_at(self, name: str) -> bool:
        path = self._paths.node(name).gauges
        try:
            status = path.stat()
            version = status.st_mtime_ns, status.st_ino
            if version == self._nodes.get(name, ((0, 0), {}))[0]:
                return False
            with open_plain(path) as file:
                self._nodes[name] = version, _parsed(file.read(_MOST))
        except OSError:
            return False
        return True


def _parsed(data: bytes) -> dict[str, Any]:
    """Damaged data is an empty file: user code can write into the job's directory."""
    with contextlib.suppress(ValueError, RecursionError):
        value = codec.loads(data)
        return value if isinstance(value, dict) else {}
    return {}


def _by_rank(value: Any) -> dict[int, Gauges]:
    if not isinstance(value, dict):
        return {}
    return {int(rank): Gauges.from_json(told) for rank, told in value.items() if rank.isdecimal()}


def append(paths: JobPaths, gauges: Mapping[int, Gauges], now: float) -> None:
    """Add a line to the job's history. ``now`` in seconds since the epoch. Raises ``OSError``."""
    line = codec.dumps({"t": now, "ranks": {str(rank): one.to_json() for rank, one in sorted(gauges.items())}}) + "\n"
    fd = os.open(paths.measured, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, line.encode("ascii"))
    finally:
        os.close(fd)


def history(paths: JobPaths, offset: int) -> tuple[list[tuple[float, dict[int, Gauges]]], int]:
    """The history from ``offset`` (bytes) on, each line with its time, and the offset after it."""
    records, end = metrics.read_file(paths.measured, offset)
    found = [(record.get("t"), record.get("ranks")) for record in records]
    return [(float(t), _by_rank(told)) for t, told in found if isinstance(t, (int, float))], end


def of_gpus(gauges: Mapping[int, Gauges], gpus: Mapping[int, str]) -> tuple[int, int] | None:
    """(bytes in use on the GPUs of a job, total bytes of these GPUs). If possible, only the use of its ranks counts.

    ``gpus``: the GPU of each rank. A value for a GPU as a whole counts once. None if nothing is known.
    """
    used: dict[str, int] = {}
    totals: dict[str, int] = {}
    for rank, told in gauges.items():
        gpu = gpus.get(rank)
        if gpu and told.gpu_memory is not None and told.gpu_total is not None:
            before = used.get(gpu, 0)
            used[gpu] = max(before, told.gpu_memory) if told.gpu_shared else before + told.gpu_memory
            totals[gpu] = told.gpu_total
    return (sum(used.values()), sum(totals.values())) if totals else None
