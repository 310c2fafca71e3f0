"""The stacks of ranks, as ``faulthandler`` writes them.

A rank is asked by a touch of its file, and a thread of the rank answers (``ranks/streams/recording.py``). Who does not
answer holds the GIL, or has no such thread yet, and is asked by a signal. The signal is not the first way: a frame that
ends in another thread while the handler reads it can crash the process. A forked worker of a DataLoader has its rank's
handler, and writes into its rank's file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..protocol.disk import read_plain, size_of
from ..protocol.paths import NodePaths
from ..protocol.process import STACKS_SIGNAL, ProcessId, handles
from ..usercode.frames import OURS
from ..usercode.stacks import in_loader, in_user_code, place, position, threads

WRITING = 0.5
"""Seconds for a rank to write its stacks."""

_WORKER_WRITING = 0.1
"""Seconds for a worker, which has few threads. One is asked after the other, because they share a file."""

PATIENCE = 5.0
"""Seconds that a rank may take to exit before a note is written."""

WORKERS = 8
"""How many workers of one rank are asked at most."""


@dataclass(frozen=True)
class Stack:
    """What a rank wrote, from ``begin`` to ``end`` of its file (bytes), and its workers after it."""

    text: str
    begin: int
    end: int
    workers: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The rank's own, then that of a worker in user code; empty if the rank did not answer."""
        worker = next((place(text) for text in self.workers if in_user_code(text)), "")
        return place(self.text) + (f"; its worker is at {worker}" if worker else "")


@dataclass
class _Asked:
    process: ProcessId
    told: Callable[[Stack], None]
    until: float
    begin: int
    """The offset in the file at which the present answer begins."""
    first: int
    """The offset at which the rank's answer begins."""
    text: str | None = None
    """The rank's own answer."""
    workers: list[str] = field(default_factory=list)
    left: list[int] | None = None
    """Workers that were not asked yet."""
    signalled: bool = False


class Stacks:
    """Of the ranks of one node."""

    def __init__(self, files: NodePaths) -> None:
        self._files = files
        self._asked: dict[int, _Asked] = {}

    def ask(self, rank: int, process: ProcessId, now: float, told: Callable[[Stack], None]) -> None:
        """Have the rank write its stacks and dump its flight recorder (``ranks/streams/recording.py``).

        ``turn`` calls ``told`` with the stacks. Without an answer the text is empty.
        """
        begin = size_of(self._files.stacks(rank))
        self._asked[rank] = _Asked(process, told, now + WRITING, begin, begin)
        touch(self._files.stacks(rank))

    def forget(self, rank: int) -> None:
        self._asked.pop(rank, None)

    def turn(self, now: float) -> None:
        """Read what was written since the question, and ask the workers of a rank that waits for them."""
        for rank, asked in list(self._asked.items()):
            if now < asked.until:
                continue
            text = self._text(rank, asked.begin)
            if not text and not asked.signalled and handles(asked.process.pid, STACKS_SIGNAL):
                asked.signalled, asked.until = True, now + WRITING
                asked.process.signal(STACKS_SIGNAL)
                continue
            if asked.text is None:
                asked.text = text
                asked.left = _workers(asked.process.pid) if in_loader(text) else []
            else:
                asked.workers.append(text)
            if asked.left:
                asked.begin, asked.until = size_of(self._files.stacks(rank)), now + _WORKER_WRITING
                ProcessId.of(asked.left.pop(0)).signal(STACKS_SIGNAL)
            else:
                del self._asked[rank]
                asked.told(Stack(asked.text, asked.first, size_of(self._files.stacks(rank)), tuple(asked.workers)))

    def _text(self, rank: int, begin: int) -> str:
        try:
            return read_plain(self._files.stacks(rank))[begin:].decode("utf-8", "replace")
        except OSError:
            return ""


def touch(stacks: Path) -> None:
    """Ask a rank for its stacks and for what its flight recorder holds."""
    with contextlib.suppress(OSError):  # it has no file yet
        os.utime(stacks)


def _workers(pid: int) -> list[int]:
    """The first children of a rank that handle our signal."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return [child for child in found if handles(child, STACKS_SIGNAL)][:WORKERS]


class Endings:
    """Ranks that have run their code but do not exit: one note tells what each waits for, by its stacks."""

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

    def _tell(self, rank: int, stack: Stack) -> None:
        words = where(stack.text)
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
