"""Rich output of the ranks, as ``ranks/streams/display`` writes it. User code may have written into the files, too."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..protocol import codec
from ..protocol.disk import open_plain
from ..protocol.errors import UserError
from ..protocol.feed import DISPLAY_LIMIT, Shown
from ..protocol.paths import JobPaths
from ..protocol.typed import Malformed, Record

PORTION = 1024 * 1024
"""Bytes that are read at a time."""

_HEAD = 200
"""The number of a display is in the first bytes of its line."""


@dataclass(frozen=True)
class Displayed(Record):
    """One record: a MIME bundle, or ``clear``."""

    kind: Literal["display", "update", "clear", "result"]
    data: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    number: int | None = None
    id: str | None = None
    wait: bool = False


@dataclass
class DisplayFile:
    """A display file, read forward. A file that is missing, or not a plain file, has no records.

    ``refused``: lines that are too long or malformed and were passed over.
    """

    path: Path
    limit: int = DISPLAY_LIMIT
    offset: int = 0
    refused: int = 0

    def read(self) -> Iterator[Displayed]:
        """The new records."""
        while (lines := self.lines()) is not None:
            for line in lines:
                if (record := self.parse(line)) is not None:
                    yield record

    def lines(self) -> list[bytes] | None:
        """The complete lines of the next ``PORTION`` bytes; None if there is none."""
        try:
            with open_plain(self.path) as file:
                file.seek(self.offset)
                data = file.read(PORTION)
                if len(data) == PORTION and b"\n" not in data:
                    data += file.read(self.limit)
        except OSError:
            return None
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) <= self.limit:
            return None
        if not whole:  # a part of a line that is too long
            self.offset += len(data)
            self.refused += 1
            return []
        self.offset += whole
        return data[: whole - 1].split(b"\n")

    def parse(self, line: bytes) -> Displayed | None:
        """None for a line that is malformed."""
        try:
            return Displayed.from_json(codec.loads(line))
        except (ValueError, Malformed):
            self.refused += 1
            return None


def find(paths: JobPaths, rank: int, number: int) -> Generator[None, None, Shown]:
    """The newest content of a display. Reads a portion with each step. Raises ``UserError`` if there is none."""
    found = None
    mark = b'"number":%d,' % number
    for path in sorted(paths.nodes.glob(f"*/rank-{rank:05d}.display")):
        file = DisplayFile(path)
        while (lines := file.lines()) is not None:
            for line in lines:
                if mark in line[:_HEAD] and (record := file.parse(line)) is not None and record.number == number:
                    found = record
            yield
    if found is None:
        raise UserError(f"rank {rank} has no display {number}", "a line that looks like one was printed by the cell")
    return {"data": found.data, "metadata": found.metadata}
