"""Before a node's ranks are ended, each writes where it is and what its recorder holds: afterwards nobody can."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence, Set

from ..protocol.paths import NodePaths
from ..protocol.process import STACKS_SIGNAL, handles

PATIENCE = 1.0
"""Seconds that the ranks have. A rank that holds Python's global lock never answers."""

_LOOK = 0.002


def ask(files: NodePaths, ranks: Sequence[int], processes: Mapping[int, int], alive: Callable[[], Set[int]]) -> None:
    """Returns when every rank has answered or has ended, or after ``PATIENCE``.

    ``ranks`` are those of the node, ``processes`` their numbers by the rank's place; ``alive`` tells which of them are.
    """
    numbers = {pid: ranks[place] for place, pid in processes.items()}
    living = alive()
    waited = {pid: _size(files, numbers[pid]) for pid in numbers if pid in living and handles(pid, STACKS_SIGNAL)}
    for pid in waited:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACKS_SIGNAL)
    end = time.monotonic() + PATIENCE
    while any(pid in alive() and _size(files, numbers[pid]) == size for pid, size in waited.items()):
        if time.monotonic() > end:
            return
        time.sleep(_LOOK)


def _size(files: NodePaths, rank: int) -> int:
    try:
        return files.recorder(rank).stat().st_size
    except OSError:
        return 0
