"""The findings of a job of ours: its ranks' logs, exceptions and exit codes together."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from ..protocol.events import Finding
from ..protocol.state import JobState, RankState
from . import logs, reading
from .elastic import End, Report
from .prefixes import read

BUDGET = 64 * 2**20
"""Bytes of logs that are read, all ranks together; of each log its two ends."""


class LogFile(Protocol):
    """One stream of one rank."""

    @property
    def rank(self) -> int: ...
    @property
    def node(self) -> str: ...
    @property
    def path(self) -> Path: ...


def diagnose(files: Iterable[LogFile], state: JobState) -> list[Finding]:
    """The cause first. Raises ``OptionError`` for a log that cannot be read."""
    files = list(files)
    largest = BUDGET // max(1, len(files))
    texts = [reading.of_file(file.path, file.rank, file.node, largest) for file in files]
    texts.append(reading.of_text("notes", "\n".join(state.notes)))
    texts += [
        reading.of_text(_name(rank), rank.error.text, rank.rank, rank.host)
        for rank in state.ranks.values()
        if rank.error is not None
    ]
    ends = tuple(_end(rank, root=place == 0) for place, rank in enumerate(state.failures()))
    return logs.diagnose(texts, Report(ends, terminated=True, present=state.state == "failed"))


def _end(rank: RankState, root: bool) -> End:
    line = read(_name(rank), 1, f"rank {rank.rank} {rank.why or rank.state}")
    return End(rank.rank, rank.host, 1 if rank.error else rank.code or 0, line, root)


def _name(rank: RankState) -> str:
    return f"how rank {rank.rank} ended"
