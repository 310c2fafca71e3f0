"""One ``*.events`` file, read forward by whoever may not trust it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .events import Event, Source, parse_lines
from .plainfiles import open_plain

LONGEST = 16 * 1024 * 1024
"""Bytes of one line: the words of an exception are the longest part. A longer line is passed over."""


@dataclass
class EventReader:
    """New events of a file, in complete lines. A file that is missing, or not a plain file, has none."""

    path: Path
    source: Source | None
    """Who may write into it; None: anybody."""
    offset: int = 0
    refused: int = 0
    """Lines that were passed over so far."""

    def read(self) -> list[Event]:
        """The events since the last call."""
        found: list[Event] = []
        try:
            if os.stat(self.path).st_size <= self.offset:
                return []
            with open_plain(self.path) as file:
                file.seek(self.offset)
                while data := file.read(LONGEST):
                    parsed = parse_lines(data, self.source)
                    found += parsed.events
                    self.refused += parsed.refused
                    taken = parsed.taken
                    if not taken and len(data) == LONGEST:
                        taken, self.refused = LONGEST, self.refused + 1
                    self.offset += taken
                    if len(data) < LONGEST:
                        break
                    file.seek(self.offset)
        except OSError:
            return found
        return found
