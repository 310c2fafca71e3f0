"""Curves and progress of the ranks: JSON lines that each rank appends to its own file (``runtime/metrics``)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..protocol import codec
from ..protocol.paths import JobPaths

Record = dict[str, Any]

_CHUNK = 4 * 1024 * 1024


def files(paths: JobPaths) -> dict[int, Path]:
    """The metrics file of each rank that has one."""
    found = paths.nodes.glob("*/rank-*.metrics")
    return {int(path.stem[5:]): path for path in sorted(found) if path.stem[5:].isdigit()}


def read(paths: JobPaths, rank: int, offset: int = 0, limit: int = _CHUNK) -> tuple[list[Record], int]:
    """Records of ``rank`` in about ``limit`` bytes from ``offset`` on, and the offset after the last whole line.

    Damaged lines are skipped; a rank without metrics has no records.
    """
    path = files(paths).get(rank)
    return ([], offset) if path is None else _read(path, offset, limit)


def _read(path: Path, offset: int, limit: int) -> tuple[list[Record], int]:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(limit)
            if len(data) == limit and b"\n" not in data:
                data += file.readline()
    except FileNotFoundError:
        return [], offset
    end = data.rfind(b"\n") + 1
    return list(_records(data[:end])), offset + end


def _records(data: bytes) -> Iterable[Record]:
    for line in data.split(b"\n"):
        try:
            record = codec.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record
