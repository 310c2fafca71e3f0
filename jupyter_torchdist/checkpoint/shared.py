"""Whether all ranks see one directory: each saves a part of a checkpoint, so on own disks of hosts none is whole."""

from __future__ import annotations

import functools
import os
import secrets
import socket
import time
from pathlib import Path

from ..protocol.errors import CheckpointError
from . import directory as directories
from .rank_agreement import Ranks

PATIENCE = 10.0
"""Seconds until a network file system shows on one host what another one has written."""


@functools.cache
def check(ranks: Ranks, directory: Path) -> None:
    """Raises ``CheckpointError`` on all ranks unless each sees what rank 0 writes into ``directory``.

    All ranks must call it.
    """
    if ranks.size == 1 or os.environ.get("LOCAL_WORLD_SIZE") == str(ranks.size):
        return

    def write() -> str:
        directories.prepare(directory)
        mark = directory / f".seen.{secrets.token_hex(8)}"
        mark.touch()
        return str(mark)

    mark = Path(ranks.by_first(write))
    try:
        ranks.together(lambda: _see(mark))
    finally:
        if ranks.first:
            mark.unlink(missing_ok=True)


def _see(mark: Path) -> None:
    until = time.monotonic() + PATIENCE
    while not mark.exists():
        if time.monotonic() > until:
            raise CheckpointError(
                f"{socket.gethostname()} does not see in {mark.parent} what the first host writes there",
                "save into a directory that all hosts share (such as one on NFS): each writes a part of a checkpoint",
            )
        time.sleep(0.1)
