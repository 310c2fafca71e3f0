"""Ranks that have run their code but do not exit: one note tells what each waits for.

The node's agent checks, because such a rank may hold the GIL forever. ``faulthandler`` writes stacks without the GIL.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping

from ..protocol.disk import read_plain
from ..protocol.paths import NodePaths
from ..protocol.process import ProcessId
from ..usercode.frames import OURS

PATIENCE = 5.0
"""Seconds that a rank may take to exit before a note is written."""

_WRITING = 0.5
"""Seconds for a rank to write its stacks."""

_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_LIBRARY = re.compile(r"/lib/python3[^/]*/|^<frozen ")

Frame = tuple[str, str, str]
"""File, line, function."""


class Endings:
    """The ranks of one node that are exiting, according to their events."""

    def __init__(self, files: NodePaths, say: Callable[[str], None]) -> None:
        self._files, self._say = files, say
        self._since: dict[int, float] = {}
        self._asked: dict[int, tuple[float, int]] = {}
        """Per rank: when it was asked for its stacks, and the offset in its file at which they begin."""

    def began(self, rank: int, now: float) -> None:
        self._since[rank] = now

    def over(self, rank: int) -> None:
        self._since.pop(rank, None)
        self._asked.pop(rank, None)

    def turn(self, processes: Mapping[int, ProcessId], now: float) -> None:
        """Ask late ranks for their stacks, and report what the stacks that were written show."""
        for rank, since in list(self._since.items()):
            if now - since >= PATIENCE and rank in processes:
                del self._since[rank]
                self._asked[rank] = now, self._size(rank)
                processes[rank].signal(signal.SIGUSR1)
        for rank, (asked, begin) in list(self._asked.items()):
            if now - asked >= _WRITING:
                del self._asked[rank]
                self._say(f"rank {rank} has run its code but does not exit: {self._place(rank, begin)}")

    def _size(self, rank: int) -> int:
        try:
            return self._files.stacks(rank).stat().st_size
        except OSError:
            return 0

    def _place(self, rank: int, begin: int) -> str:
        path = self._files.stacks(rank)
        try:
            text = read_plain(path)[begin:].decode("utf-8", "replace")
        except OSError:
            text = ""
        words = where(text)
        return f"{words}; see {path}" if words else "where it waits is not known"


def where(text: str) -> str:
    """What a rank waits for, in words, according to its stacks from ``faulthandler``; empty if there are none."""
    threads = [frames for block in re.split(r"\n\s*\n", text) if (frames := _FRAME.findall(block))]
    if not threads:
        return ""
    main = threads.pop()  # the first thread of a process is written last
    if any(function == "_join_threads" for file, _, function in main if file.startswith(OURS)):
        others = [frames for frames in threads if not any(file.startswith(OURS) for file, _, _ in frames)]
        places = ", ".join(_position(frames) for frames in others)
        return f"it waits for its threads ({places}), because Python waits for threads that are not daemons"
    return f"it is in {_position(main)}"


def _position(frames: list[Frame]) -> str:
    """The innermost line outside libraries; if there is none, the innermost line."""
    own = [frame for frame in frames if not _LIBRARY.search(frame[0]) and not frame[0].startswith(OURS)]
    file, line, function = (own or frames)[0]
    return f"{file}, line {line}, {function}"
