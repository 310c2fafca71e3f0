"""Ranks that have run their code but do not exit: one note tells what each waits for.

The node's agent checks, because such a rank may hold the GIL forever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from ..protocol.paths import NodePaths
from ..protocol.process import ProcessId
from ..usercode.frames import OURS
from .stacks import Stacks, position, threads

PATIENCE = 5.0
"""Seconds that a rank may take to exit before a note is written."""


class Endings:
    """The ranks of one node that are exiting, according to their events."""

    def __init__(self, files: NodePaths, stacks: Stacks, say: Callable[[str], None]) -> None:
        self._files, self._stacks, self._say = files, stacks, say
        self._since: dict[int, float] = {}

    def began(self, rank: int, now: float) -> None:
        self._since[rank] = now

    def over(self, rank: int) -> None:
        self._since.pop(rank, None)
        self._stacks.forget(rank)

    def turn(self, processes: Mapping[int, ProcessId], now: float) -> None:
        """Ask late ranks for their stacks, and say what these show."""
        for rank, since in list(self._since.items()):
            if now - since >= PATIENCE and rank in processes:
                del self._since[rank]
                self._stacks.ask(rank, processes[rank], now, partial(self._tell, rank))

    def _tell(self, rank: int, text: str) -> None:
        words = where(text)
        told = f"{words}; see {self._files.stacks(rank)}" if words else "where it waits is not known"
        self._say(f"rank {rank} has run its code but does not exit: {told}")


def where(text: str) -> str:
    """What a rank waits for, in words, according to its stacks; empty if there are none."""
    found = threads(text)
    if not found:
        return ""
    main = found.pop()
    if any(function == "join_threads" for file, _, function in main if file.startswith(OURS)):
        others = [frames for frames in found if not any(file.startswith(OURS) for file, _, _ in frames)]
        places = ", ".join(map(position, others))
        return f"it waits for its threads ({places}), because Python waits for threads that are not daemons"
    return f"it is in {position(main)}"
