"""Captured data on its way to a node that does not see this machine's disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

PIECE = 256 * 1024
"""Bytes of a blob in one frame."""


def pieces(path: Path, digest: str) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The frames that transfer a blob."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        offset, last = 0, False
        while not last:
            data = file.read(PIECE)
            last = not data or offset + len(data) >= size
            yield {"type": "blob", "digest": digest, "offset": offset, "last": last}, data
            offset += len(data)
