"""Curves and progress of the ranks: JSON lines that each rank appends to its own file (``ranks/streams/metrics``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..protocol import codec
from ..protocol.disk import open_plain
from ..protocol.paths import JobPaths

Record = dict[str, Any]

_CHUNK = 4 * 1024 * 1024


def files(paths: JobPaths) -> dict[int, Path]:
    """The metrics file of each rank that has one."""
    found = paths.nodes.glob("*/rank-*.metrics")
    return {int(path.stem[5:]): path for path in sorted(found) if path.stem[5:].isdigit()}


def read(paths: JobPaths, rank: int, offset: int = 0, limit: int = _CHUNK) -> tuple[list[Record], int]:
    """Records of ``rank`` in about ``limit`` bytes from ``offset`` on, and the offset after the last complete line.

    Damaged lines are skipped. A rank without metrics has no records.
    """
    path = files(paths).get(rank)
    return ([], offset) if path is None else read_file(path, offset, limit)


def read_file(path: Path, offset: int, limit: int = _CHUNK) -> tuple[list[Record], int]:
    """As ``read``, of a file of JSON lines."""
    try:
        with open_plain(path) as file:
            file.seek(offset)
            data = file.read(limit)
            if len(data) == limit and b"\n" not in data:
                data += file.readline()
    except OSError:
        return [], offset
    end = data.rfind(b"\n") + 1
    return list(_records(data[:end])), offset + end


def _records(data: bytes) -> Iterator[Record]:
    for line in data.split(b"\n"):
        try:
            record = codec.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def columns(paths: JobPaths) -> dict[str, list[Any]]:
    """All curves as columns of equal length: ``rank``, ``step``, ``t`` (seconds since the epoch), and one per curve.

    A row is one call of ``td.log``. Curves that the call did not log are None, and so is a step that was not given.
    """
    rows = [(rank, record) for rank in files(paths) for record in _all(paths, rank) if record.get("k") == "log"]
    rows = [(rank, record) for rank, record in rows if isinstance(record.get("v"), dict) and record["v"]]
    table: dict[str, list[Any]] = {
        "rank": [rank for rank, _ in rows],
        "step": [record.get("step") for _, record in rows],
        "t": [record.get("t") for _, record in rows],
    }
    for name in dict.fromkeys(name for _, record in rows for name in record["v"]):
        table[name if name not in table else f"{name}_"] = [record["v"].get(name) for _, record in rows]
    return table


def _all(paths: JobPaths, rank: int) -> Iterator[Record]:
    offset = 0
    while True:
        records, end = read(paths, rank, offset)
        if end == offset:
            return
        yield from records
        offset = end
