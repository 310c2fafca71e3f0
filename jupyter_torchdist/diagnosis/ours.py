"""The findings of a job of ours: its ranks' logs, exceptions, exit codes and flight recorders together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from ..protocol.errors import OptionError
from ..protocol.events import Finding
from ..protocol.state import RANK_ENDS, JobState, RankState
from . import dumps, logs, reading
from .dumps import Dump
from .elastic import End, Report
from .prefixes import read

BUDGET = 64 * 2**20
"""Bytes of logs that are read, all ranks together; of each log its two ends. So many of one recorder, too."""

ASKED_WITH = 5.0
"""Seconds that a rank's place may be older than a dump of the same wait."""

FAILED = {"failed": "failed", "lost": "is lost", "timed_out": "has timed out"}
UNDETERMINED = "undetermined"


class LogFile(Protocol):
    """One stream of one rank; ``recorder`` is that of its flight recorder's dumps."""

    @property
    def rank(self) -> int: ...
    @property
    def stream(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def path(self) -> Path: ...


def diagnose(files: Iterable[LogFile], state: JobState) -> list[Finding]:
    """The cause first. Raises ``OptionError`` for a log that cannot be read."""
    files = list(files)
    largest = BUDGET // max(1, len(files))
    texts = [reading.of_file(file.path, file.rank, file.node, largest) for file in files if file.stream != "recorder"]
    texts.append(reading.of_text("notes", "\n".join(state.notes)))
    texts += [
        reading.of_text(_name(rank), rank.error.text, rank.rank, rank.host)
        for rank in state.ranks.values()
        if rank.error is not None
    ]
    ends = tuple(_end(rank, root=place == 0) for place, rank in enumerate(state.failures()))
    recorded = _dumps(files, state)
    since = min((dump.time for dump in recorded), default=0.0) - ASKED_WITH
    places = dict(state.places(state.ranks, since))
    found = logs.diagnose(texts, Report(ends, terminated=True, present=state.state == "failed"), recorded, places)
    return _with_reason(found, state)


def _with_reason(found: list[Finding], state: JobState) -> list[Finding]:
    """Where no log tells a cause, the reason that the job itself has, such as its launcher's words."""
    known = [one for one in found if one.code != UNDETERMINED]
    if state.state not in FAILED or not state.reason or any(one.severity == "fault" for one in known):
        return found
    words = f"The job {FAILED[state.state]}: {state.reason}"
    evidence = next((one.evidence for one in found if one not in known), ())
    why, remedy = "The logs of its ranks tell no other cause.", "Correct this, then run it again."
    return [Finding(UNDETERMINED, "fault", None, None, words, why, remedy, evidence), *known]


def _dumps(files: Sequence[LogFile], state: JobState) -> list[Dump]:
    """The last one of each rank, where they tell of the job as it is: while it runs, of a wait that goes on."""
    waits = [waiting.since for rank in state.ranks.values() if (waiting := rank.waits_in)]
    over = state.final or all(rank.state in RANK_ENDS for rank in state.ranks.values())
    if state.state == "succeeded" or not (over or waits):
        return []
    found = {}
    for file in files:
        if file.stream == "recorder":
            dump = _dump(file)
            if dump is not None and (over or dump.end or dump.time > max(waits)):
                found[file.rank] = dump
    return list(found.values())


def _dump(file: LogFile) -> Dump | None:
    """None for a file that user code has damaged, and for one whose rank is not the owner."""
    try:
        dump = dumps.read(str(file.path), reading.data_of(file.path, BUDGET), file.node)
    except OptionError:
        return None
    return dump if dump.rank == file.rank else None


def _end(rank: RankState, root: bool) -> End:
    line = read(_name(rank), 1, f"rank {rank.rank} {rank.why or rank.state}")
    return End(rank.rank, rank.host, 1 if rank.error else rank.code or 0, line, root)


def _name(rank: RankState) -> str:
    return f"how rank {rank.rank} ended"
