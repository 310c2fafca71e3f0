"""Lines as a terminal shows them after *cursor up*, which nested tqdm bars write: one line for each bar, its newest."""

from __future__ import annotations

import re

from ..protocol.feed import LINE_LIMIT

DEPTH = 8
"""How many whole lines can change at most: bars inside one another."""

_UP = re.compile(r"\x1b\[(\d{0,4})A")


class Screen:
    """The last lines of one stream. They are held while they can change: a bar begins with a carriage return."""

    def __init__(self) -> None:
        self._rows = [""]
        self._at = 0
        self._top: int | None = None
        """The highest line that the cursor went up to; None: all bars have ended."""

    def write(self, text: str) -> str:
        """Take in more of the stream. Returns the lines that are settled, with their newlines."""
        if len(self._rows) == 1 and self._top is None and "\r" not in text:  # no bar: nothing is to be held
            whole, newline, self._rows[0] = (self._rows[0] + text).rpartition("\n")
            self._put("")
            return whole + newline + self._take(self._settled())
        for number, line in enumerate(text.split("\n")):
            if number > 0:
                self._down()
            first, *moves = _UP.split(line)
            self._put(first)
            for count, piece in zip(moves[::2], moves[1::2], strict=True):
                self._at = max(0, self._at - int(count or 1))
                self._top = self._at if self._top is None else min(self._top, self._at)
                self._put(piece)
        return self._take(self._settled())

    def end(self) -> str:
        """The lines that were held, and the text after the last newline. Blank lines that bars left are dropped."""
        while self._top is not None and len(self._rows) > 1 and not self._rows[-1].strip():
            self._rows.pop()
        text = self._take(len(self._rows) - 1) + self._rows[0]
        self._rows, self._at, self._top = [""], 0, None
        return text

    def _put(self, text: str) -> None:
        row = text if self._top is not None and text.startswith("\r") else self._rows[self._at] + text
        if len(row) > LINE_LIMIT:  # of a line without end only what a terminal would still show
            row = row[row.rfind("\r") + 1 :]
        self._rows[self._at] = row
        if len(row) > LINE_LIMIT:
            self._down()

    def _down(self) -> None:
        self._at += 1
        if self._at < len(self._rows):
            self._rows[self._at] = f"{self._rows[self._at]}\r" if self._rows[self._at].strip() else ""
            return
        if self._rows[-1].strip() and not self._rows[-1].startswith("\r"):
            self._top = None
        self._rows.append("")

    def _settled(self) -> int:
        """How many lines cannot change any more."""
        whole = len(self._rows) - 1
        if self._top is not None:
            return max(self._top, whole - DEPTH)
        last = whole
        while last > 0 and not self._rows[last - 1].strip():
            last -= 1
        bar = last > 0 and self._rows[last - 1].startswith("\r")
        return max(last - 1 if bar else whole, whole - DEPTH)

    def _take(self, count: int) -> str:
        taken, self._rows = self._rows[:count], self._rows[count:]
        self._at = max(0, self._at - count)
        self._top = None if self._top is None else max(0, self._top - count)
        return "".join(f"{row}\n" for row in taken)


def settled(text: str) -> str:
    """The whole ``text`` as a terminal shows it."""
    if not _UP.search(text):
        return text
    screen = Screen()
    return screen.write(text) + screen.end()


def lines_in(data: bytes) -> int:
    """How many lines end in ``data``, about: each *cursor up* takes a newline back."""
    return data.count(b"\n") - data.count(b"\x1b[A")
