"""What the tools answer. Each answer is bounded; ``rest`` says how to ask for what was left out, if anything was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ..client.stacks import RankStack
from ..protocol.errors import UserError
from ..protocol.events import ErrorRecord, Finding
from ..protocol.gauges import Gauges
from ..protocol.state import JobState
from ..protocol.typed import Record
from ..store.cache import JobSummary
from ..verbs.schema import Standing

TEXT = 4000
"""Characters of one text, such as a traceback."""

LINE = 500
"""Characters of one line that is shown beside others."""

FEW = 5
"""Failures, findings and lines of evidence in one answer."""

MOST = 50
"""Items of a list in one answer, if the question does not ask for fewer."""

T = TypeVar("T")


@dataclass(frozen=True)
class JobList(Record):
    """Jobs, the newest first."""

    jobs: tuple[JobSummary, ...]
    total: int
    rest: str


@dataclass(frozen=True)
class JobPage(Record):
    """One job."""

    standing: Standing
    label: str
    """The cell or the script."""
    now: str
    """State, ranks and time in one line."""
    waits: tuple[str, ...]
    """Which ranks wait for whom, and where those are."""
    hosts: tuple[str, ...]
    ranks: int
    source: str
    command: str
    """What one types to run it again in a shell."""
    rest: str


@dataclass(frozen=True)
class RankRow(Record):
    """One rank. ``state`` in words."""

    rank: int
    host: str
    pid: int
    state: str
    gauges: Gauges


@dataclass(frozen=True)
class RankList(Record):
    """Ranks, in order."""

    ranks: tuple[RankRow, ...]
    total: int
    rest: str


@dataclass(frozen=True)
class LogText(Record):
    """Bytes ``start`` to ``end`` of one rank's output; ``size`` is all that there is now."""

    rank: int
    stream: str
    start: int
    end: int
    size: int
    text: str
    rest: str


@dataclass(frozen=True)
class HitLine(Record):
    """A line that a search found. ``start`` is its first byte, for the tool ``logs``."""

    rank: int
    stream: str
    start: int
    text: str


@dataclass(frozen=True)
class Hits(Record):
    """What a search found, the newest first. ``at``: give it again with the same pattern to go on; null at the end."""

    hits: tuple[HitLine, ...]
    at: dict[str, int] | None
    rest: str


@dataclass(frozen=True)
class FindingList(Record):
    """Why a job failed, the cause first; empty where no line tells of a fault."""

    findings: tuple[Finding, ...]
    rest: str


@dataclass(frozen=True)
class StackList(Record):
    """Where the ranks are that have not ended."""

    stacks: tuple[RankStack, ...]
    total: int
    rest: str


@dataclass(frozen=True)
class Curve(Record):
    """Points of one curve. Neighbours are merged: ``y`` is their mean, ``low`` and ``high`` their range.

    Null stands for NaN and infinity.
    """

    name: str
    rank: int
    x: tuple[float | None, ...]
    y: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


@dataclass(frozen=True)
class CurveList(Record):
    """Curves. Without ``names`` in the question: which there are, and the last values of rank 0."""

    names: tuple[str, ...]
    last: dict[str, float | None]
    curves: tuple[Curve, ...]
    complete: bool
    """Whether no points were merged."""
    rest: str


@dataclass(frozen=True)
class PlanText(Record):
    """What options would run."""

    text: str
    notes: tuple[str, ...]
    rest: str


def part(items: Sequence[T], first: int, count: int, what: str) -> tuple[tuple[T, ...], str]:
    """``count`` items from ``first`` on, and how to ask for those after them. Raises ``UserError``."""
    if first < 0 or count < 1:
        raise UserError(f"first={first}, count={count} is no range of {what}", "first counts from 0, count from 1")
    if first and first >= len(items):
        raise UserError(f"there are {len(items)} {what}, and none from {first} on", "first counts from 0")
    end = min(first + min(count, MOST), len(items))
    left = len(items) - end
    return tuple(items[first:end]), f"{left} more {what}: ask with first={end}" if left else ""


def cut(text: str, most: int, *, end: bool = False) -> str:
    """At most ``most`` characters of ``text``, with a mark where some are left out; ``end``: its last ones."""
    if len(text) <= most:
        return text
    mark = f"… {len(text) - most} characters are left out …"
    return mark + text[-most:] if end else text[:most] + mark


def standing(state: JobState) -> tuple[Standing, list[str]]:
    """How a job stands, and which tools tell what was left out."""
    found = Standing.of(state)
    rest = [
        f"{len(items) - FEW} more {what}: `{tool}`"
        for what, items, tool in (
            ("failures", found.failures, "ranks"),
            ("findings", found.findings, "findings"),
            ("notes", found.notes[MOST - FEW :], "torchdist show in a shell"),
        )
        if len(items) > FEW
    ]
    failures = tuple(replace(one, error=one.error and _error(one.error)) for one in found.failures[:FEW])
    if any(one.error is not None and one.error.text.startswith("… ") for one in failures):
        rest.append("whole tracebacks: `logs` with stream=err")
    notes = tuple(cut(note, LINE) for note in found.notes[:MOST])
    found = replace(found, reason=cut(found.reason, TEXT), failures=failures, notes=notes)
    return replace(found, findings=findings(found.findings)), rest


def findings(found: Sequence[Finding]) -> tuple[Finding, ...]:
    """The first ones, with a few lines of evidence."""
    return tuple(
        replace(
            one,
            sentence=cut(one.sentence, TEXT),
            evidence=tuple(replace(line, text=cut(line.text, LINE)) for line in one.evidence[:FEW]),
        )
        for one in found[:FEW]
    )


def _error(record: ErrorRecord) -> ErrorRecord:
    """What raised is at the end of a traceback."""
    frames = tuple((file, line, function, cut(source, LINE)) for file, line, function, source in record.frames[-FEW:])
    message = cut(record.message, TEXT)
    return replace(record, message=message, text=cut(record.text, TEXT, end=True), frames=frames)
