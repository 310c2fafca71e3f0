"""What the ranks of a job take, as the agents of its nodes wrote it (``node/gauges``)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from ..protocol import codec
from ..protocol.gauges import Gauges
from ..protocol.paths import JobPaths, is_safe

_MOST = 4 * 1024 * 1024
"""Bytes of one node's file that are read: its ranks need some hundred each."""


def read(paths: JobPaths) -> dict[int, Gauges]:
    """By rank; empty for a job that was over at once, or of an earlier version."""
    files = GaugeFiles(paths)
    files.look()
    return files.latest


class GaugeFiles:
    """The files of all nodes; only what was replaced is read again."""

    def __init__(self, paths: JobPaths) -> None:
        self._paths = paths
        self._nodes: dict[Path, tuple[tuple[int, int], dict[int, Gauges]]] = {}
        self.latest: dict[int, Gauges] = {}
        """By rank, as of the last look."""

    def look(self) -> None:
        changed = [self._look_at(self._paths.node(name).gauges) for name in self._names()]
        if any(changed):
            self.latest = {rank: gauges for _, node in self._nodes.values() for rank, gauges in node.items()}

    def _names(self) -> list[str]:
        try:
            return sorted(entry.name for entry in os.scandir(self._paths.nodes) if is_safe(entry.name))
        except OSError:
            return []

    def _look_at(self, path: Path) -> bool:
        try:
            status = path.stat()
            version = status.st_mtime_ns, status.st_ino
            if version == self._nodes.get(path, ((0, 0), {}))[0]:
                return False
            with open(path, "rb") as file:
                self._nodes[path] = version, _parsed(file.read(_MOST))
        except OSError:
            return False
        return True


def _parsed(data: bytes) -> dict[int, Gauges]:
    """What is damaged holds nothing: user code can write into the job's directory."""
    with contextlib.suppress(ValueError, RecursionError):
        value = codec.loads(data)
        if isinstance(value, dict):
            return {int(rank): Gauges.from_json(told) for rank, told in value.items() if rank.isdecimal()}
    return {}


def of_gpus(gauges: Mapping[int, Gauges], gpus: Mapping[int, str]) -> tuple[int, int] | None:
    """Bytes in use on the GPUs of a job, by its ranks as far as that is told, and all that these GPUs have.

    ``gpus`` is each rank's. What is told of a whole GPU counts once. None where nothing is known.
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
