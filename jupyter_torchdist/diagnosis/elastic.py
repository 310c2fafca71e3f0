"""How processes ended, as their launchers say: torchrun's report, mpirun, srun, Ray, Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..protocol.process import signal_name
from .prefixes import Line
from .reading import Log

_ROOT = re.compile(r"Root Cause \(first observed failure\)")
_FIELD = re.compile(r"\s*(?P<name>time|host|rank|exitcode)\s*: (?P<value>.*)")
_EXIT = re.compile(r"(?P<code>-?\d+) \(pid: (?P<pid>\d+)\)")
_RANK = re.compile(r"(?P<rank>\d+) \(local_rank: \d+\)")
_FAILED = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+) \(pid: (?P<pid>\d+)\)")
_TERMINATED = re.compile(r"Sending process (?P<pid>\d+) closing signal")
_MPIRUN = re.compile(
    r"process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node (?P<node>\S+) exited on signal (?P<signal>\d+)"
)
_SRUN = re.compile(
    r"srun: error: (?P<node>[\w.-]+): tasks? (?P<rank>\d+)[\d,-]*: "
    r"(?:Exited with exit code (?P<code>\d+)|(?P<words>Killed|Segmentation fault|Out Of Memory|Aborted|Bus error))"
)
_SIGNALS = {
    "Killed": 9,
    "Segmentation fault": 11,
    "Out Of Memory": 9,
    "Aborted": 6,
    "Bus error": 7,
}
_WORDS = ("Root Cause", "exitcode", "closing signal", "process rank", "srun: error:")

BLOCK = 8
"""Lines of one entry of torchrun's report."""


@dataclass(frozen=True)
class End:
    """``code`` is negative for a signal. ``root`` is what the launcher saw first."""

    rank: int | None
    node: str | None
    code: int
    line: Line
    root: bool = False

    @property
    def words(self) -> str:
        return f"exit code {self.code}" if self.code >= 0 else signal_name(-self.code)


@dataclass(frozen=True)
class Report:
    """``terminated`` tells whether the launcher ended processes that still ran; ``present`` whether it reported."""

    ends: tuple[End, ...]
    terminated: bool
    present: bool

    @property
    def root(self) -> End | None:
        return next((end for end in self.ends if end.root), None)


NOTHING = Report((), False, False)


def merged(reports: Iterable[Report]) -> Report:
    """Of several logs of one job."""
    reports = list(reports)
    ends = tuple(end for report in reports for end in report.ends)
    return Report(ends, any(one.terminated for one in reports), any(one.present for one in reports))


def find(log: Log) -> Report:
    """Of one log; every entry of torchrun's report, and each line of the other launchers."""
    ends: list[End] = []
    root_follows = terminated = present = False
    for place in sorted({place for word in _WORDS for place in log.having(word)}):
        line = log.line(place)
        if _ROOT.search(line.text):
            root_follows = present = True
        elif _TERMINATED.search(line.text):
            terminated = True
        elif (field := _FIELD.match(line.text)) and field["name"] == "exitcode":
            ends += _entry(log, place, field["value"], root_follows)
        elif found := _MPIRUN.search(line.text):
            ends.append(End(int(found["rank"]), found["node"], -int(found["signal"]), line, not ends))
        elif found := _SRUN.search(line.text):
            code = int(found["code"]) if found["code"] else -_SIGNALS[found["words"]]
            ends.append(End(int(found["rank"]), found["node"], code, line, not ends and code != 143))
        elif (found := _FAILED.search(line.text)) and not any(end.root for end in ends):
            ends.append(End(int(found["rank"]), line.node, int(found["code"]), line))
    if present:
        ends = [end for end in ends if not _FAILED.search(end.line.text)]
    elif ends and not any(end.root for end in ends):
        ends[0] = End(ends[0].rank, ends[0].node, ends[0].code, ends[0].line, True)
    return Report(tuple(ends), terminated, present)


def _entry(log: Log, place: int, value: str, root: bool) -> list[End]:
    """One process of torchrun's report: host and rank stand above its exit code."""
    code = _EXIT.match(value)
    if code is None:
        return []
    node = rank = None
    for above in range(place - 1, max(place - BLOCK, -1), -1):
        field = _FIELD.match(log.line(above).text)
        if field is None or field["name"] == "exitcode":
            break
        if field["name"] == "host":
            node = field["value"].strip()
        elif field["name"] == "rank" and (named := _RANK.match(field["value"])):
            rank = int(named["rank"])
    return [End(rank, node, int(code["code"]), log.line(place), root)]
