"""Files of text, as lines; and the lines of them that may say something, found fast.

Logs repeat: a line's *shape* is its ASCII text without digits, and every shape is searched once.
"""

from __future__ import annotations

import gzip
import sys
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

from ..protocol.disk import open_plain
from ..protocol.errors import OptionError
from .prefixes import LONGEST, Line, read

KEPT = 1000
"""How many lines with one word are read, half from the front and half from the back."""

LARGEST = 256 * 2**20
"""Bytes of a file that are read, half from the front and half from the back."""

_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class _Shapes:
    """Of each shape: where it begins in ``text``, and the places of its lines."""

    text: bytes
    starts: list[int]
    places: list[list[int]]


@dataclass(frozen=True)
class Log:
    """One file's text. A place is the index of a line. ``rank`` and ``node`` are known of a file of one rank."""

    name: str
    lines: Sequence[str]
    rank: int | None = None
    node: str | None = None

    @cached_property
    def _shapes(self) -> _Shapes:
        places: dict[bytes, list[int]] = {}
        text = "\n".join(line[:LONGEST] for line in self.lines).encode("ascii", "ignore")
        for place, shape in enumerate(text.translate(None, b"0123456789").split(b"\n")):
            places.setdefault(shape, []).append(place)
        starts = list(accumulate((len(shape) + 1 for shape in places), initial=0))
        return _Shapes(b"\n".join(places), starts, list(places.values()))

    def line(self, place: int) -> Line:
        """With who printed it."""
        line = read(self.name, place + 1, self.lines[place])
        if self.rank is None:
            return line
        return replace(line, rank=self.rank, node=self.node or line.node)

    def having(self, word: str, most: int = KEPT) -> list[int]:
        """Places of lines that hold ``word``, which has no digit; at most ``most``, half from each end."""
        shapes, wanted = self._shapes, word.encode()
        found: set[int] = set()
        start, end = 0, len(shapes.text)
        for half in (most // 2, most):  # from the front, then from the back of what is left
            while len(found) < half and start < end:
                forward = half < most
                at = shapes.text.find(wanted, start, end) if forward else shapes.text.rfind(wanted, start, end)
                if at < 0:
                    start = end
                    break
                index = bisect_right(shapes.starts, at) - 1
                found.update(_ends(shapes.places[index], most))
                start, end = (shapes.starts[index + 1], end) if forward else (start, shapes.starts[index])
        return _ends(sorted(found), most)


def _ends(places: list[int], most: int) -> list[int]:
    return places if len(places) <= most else [*places[: most // 2], *places[-most // 2 :]]


def of_text(name: str, text: str, rank: int | None = None, node: str | None = None) -> Log:
    """A carriage return, as progress bars print it, ends a line, too."""
    return Log(name, text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), rank, node)


def of_file(path: Path, rank: int | None = None, node: str | None = None, largest: int = LARGEST) -> Log:
    """As ``data_of``."""
    return of_data(str(path), data_of(path, largest), rank, node)


def of_data(name: str, data: bytes, rank: int | None = None, node: str | None = None) -> Log:
    return of_text(name, data.decode("utf-8", "replace"), rank, node)


def data_of(path: Path, largest: int = LARGEST) -> bytes:
    """``-`` is standard input. What is packed is unpacked. Of more than ``largest`` bytes, the two ends are read.

    Raises ``OptionError`` for what cannot be read.
    """
    try:
        with sys.stdin.buffer if str(path) == "-" else open_plain(path) as file:
            return _unpacked(file, largest)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"{path} cannot be read: {reason}", "give a text file, or one packed by gzip") from error


def _unpacked(file: BinaryIO, largest: int) -> bytes:
    packed = file.peek(len(_GZIP)).startswith(_GZIP)  # type: ignore[attr-defined]
    return _both_ends(gzip.GzipFile(fileobj=file) if packed else file, largest // 2)  # type: ignore[arg-type]


def _both_ends(file: BinaryIO, half: int) -> bytes:
    """The whole, or the two ends of what is longer than twice ``half``."""
    head, tail = file.read(half), b""
    while piece := file.read(half):
        tail = (tail + piece)[-half:]
    return head + tail
