"""The stacks of ranks, as ``faulthandler`` writes them at a signal: also of a rank that holds the GIL forever."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..protocol.disk import read_plain
from ..protocol.paths import NodePaths
from ..protocol.process import STACKS_SIGNAL, ProcessId
from ..usercode.frames import OURS

_WRITING = 0.5
"""Seconds for a rank to write its stacks."""

_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_LIBRARY = re.compile(r"/lib/python3[^/]*/|^<frozen ")
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/|.*/lib/python3[^/]*/")
_WRAPPERS = ("wrapper", "wrapped", "_wrapped_call_impl", "_call_impl", "inner", "_fn", "decorate_context")

Frame = tuple[str, str, str]
"""File, line, function."""


class Stacks:
    """Of the ranks of one node."""

    def __init__(self, files: NodePaths) -> None:
        self._files = files
        self._asked: dict[int, tuple[float, int, Callable[[str], None]]] = {}
        """Per rank: when it was asked, and the offset in its file at which the answer begins."""

    def ask(self, rank: int, process: ProcessId, now: float, told: Callable[[str], None]) -> None:
        """Have the rank write its stacks and dump its flight recorder (``ranks/recording.py``).

        ``turn`` calls ``told`` with the text, empty if there is none.
        """
        self._asked[rank] = now, self._size(rank), told
        process.signal(STACKS_SIGNAL)

    def forget(self, rank: int) -> None:
        self._asked.pop(rank, None)

    def turn(self, now: float) -> None:
        """Read what ranks have written that were asked a moment ago."""
        for rank, (asked, begin, told) in list(self._asked.items()):
            if now - asked >= _WRITING:
                del self._asked[rank]
                told(self._text(rank, begin))

    def _size(self, rank: int) -> int:
        try:
            return self._files.stacks(rank).stat().st_size
        except OSError:
            return 0

    def _text(self, rank: int, begin: int) -> str:
        try:
            return read_plain(self._files.stacks(rank))[begin:].decode("utf-8", "replace")
        except OSError:
            return ""


def threads(text: str) -> list[list[Frame]]:
    """The frames of each thread, inner to outer. The main thread is the last, as ``faulthandler`` writes it."""
    return [frames for block in re.split(r"\n\s*\n", text) if (frames := _FRAME.findall(block))]


def position(frames: list[Frame]) -> str:
    """The innermost line outside libraries; if there is none, the innermost line."""
    own = [frame for frame in frames if not _is_library(frame)]
    file, line, function = (own or frames)[0]
    return f"{file}, line {line}, {function}"


def place(text: str) -> str:
    """Where the main thread is: the user's line, and the function of a library that it called; empty if not known.

    ``Cell In[3], line 6, in torch.utils.data.dataloader.__next__``. Of collectives the line alone.
    """
    found = threads(text)
    if not found:
        return ""
    main = found[-1]
    own = next((index for index, frame in enumerate(main) if not _is_library(frame)), None)
    if own is None:
        return position(main)
    file, line, function = main[own]
    called = next((frame for frame in reversed(main[:own]) if frame[2] not in _WRAPPERS), None)
    if called is not None:
        module = _PACKAGES.sub("", called[0]).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        function = "<module>" if module.startswith("torch.distributed.") else f"{module}.{called[2]}"
    return f"{file}, line {line}" + ("" if function == "<module>" else f", in {function}")


def _is_library(frame: Frame) -> bool:
    return bool(_LIBRARY.search(frame[0])) or frame[0].startswith(OURS)
