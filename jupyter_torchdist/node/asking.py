"""Before a node's ranks are ended, each writes where it is and what its recorder holds: afterwards nobody can."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence, Set

from ..protocol.disk import size_of
from ..protocol.paths import NodePaths
from ..protocol.process import STACKS_SIGNAL, handles
from .stacks import WRITING, touch

PATIENCE = 1.0
"""Seconds that the ranks have. A rank that holds Python's global lock never writes what its recorder holds."""

_LOOK = 0.002


def ask(files: NodePaths, ranks: Sequence[int], processes: Mapping[int, int], alive: Callable[[], Set[int]]) -> None:
    """Returns when every rank has answered or has ended, or after ``PATIENCE``.

    ``ranks`` are those of the node, ``processes`` their numbers by the rank's place; ``alive`` tells which of them are.
    """
    numbers = {pid: ranks[place] for place, pid in processes.items()}
    living = alive()
    waited = {
        pid: size_of(files.recorder(numbers[pid])) for pid in numbers if pid in living and handles(pid, STACKS_SIGNAL)
    }
    begun = time.monotonic()

    def mute(seconds: float) -> list[int]:
        """Those that have not answered after so many seconds from the beginning."""
        while True:
            living = alive()
            left = [
                pid for pid, size in waited.items() if pid in living and size_of(files.recorder(numbers[pid])) == size
            ]
            if not left or time.monotonic() - begun > seconds:
                return left
            time.sleep(_LOOK)

    for pid in waited:
        touch(files.stacks(numbers[pid]))
    for pid in mute(min(WRITING, PATIENCE)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACKS_SIGNAL)
    mute(PATIENCE)
