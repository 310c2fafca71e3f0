"""One ``*.events`` file, read forward by whoever may not trust it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .disk import open_plain
from .events import AGENT, LAUNCHER, RANK, Event, Parsed, Source, parse_lines
from .paths import NodePaths

LONGEST = 16 * 1024 * 1024
"""Bytes of one line: the words of an exception are the longest part. A longer line is passed over."""

PORTION = 1024 * 1024
"""Bytes that are read at a time."""

_OF_A_RANK = re.compile(r"rank-(\d{5,})\.events")


@dataclass
class EventReader:
    """New events of a file, in complete lines. A file that is missing, or not a plain file, has none."""

    path: Path
    source: Source | None
    """Who may write into it; None: anybody."""
    offset: int = 0
    refused: int = 0
    """Lines that were passed over so far."""
    restarts: int | None = None
    """Stop before what was written after a later start of the ranks; None: read on."""
    ahead: Event | None = None
    """The event before which it stopped."""

    def read(self) -> list[Event]:
        """The next events, of about ``PORTION`` bytes: a flood of them takes neither the memory nor the turn of others.

        Empty once everything was read.
        """
        try:
            while os.stat(self.path).st_size > self.offset:
                parsed = self._next()
                self.refused += parsed.refused
                self.ahead = parsed.ahead
                self.offset += parsed.taken
                if parsed.events or not parsed.taken:
                    return parsed.events
        except OSError:
            pass
        return []

    def _next(self) -> Parsed:
        """Complete lines from ``offset`` on; a line that is too long is taken as refused. Raises ``OSError``."""
        with open_plain(self.path) as file:
            file.seek(self.offset)
            data = file.read(PORTION)
            if b"\n" not in data:
                data += file.read(LONGEST)
        parsed = parse_lines(data, self.source, self.restarts)
        return parsed if parsed.taken or parsed.ahead or len(data) <= LONGEST else Parsed([], len(data), 1)


def reader_of(files: NodePaths, ranks: Sequence[int], name: str) -> EventReader | None:
    """The reader of one of a node's event files; None for a file that no process of ours writes."""
    source = None
    if name == files.agent_events.name:
        source = Source(AGENT, frozenset(ranks))
    elif name == files.launcher_events.name:
        source = Source(LAUNCHER)
    elif (match := _OF_A_RANK.fullmatch(name)) and (rank := int(match[1])) in ranks:
        source = Source(RANK, frozenset([rank])) if name == files.rank_events(rank).name else None
    return None if source is None else EventReader(files.root / name, source)
