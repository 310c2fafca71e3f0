"""``diagnose``: the findings of a job's logs, whoever ran it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..protocol.events import Finding
from . import elastic, recorder, tracebacks
from .catalogue import LISTED, Kind, kinds_by_word
from .dumps import Dump
from .judge import Case, Sign
from .prefixes import Line
from .reading import Log

FACTS = 500
"""Lines with one of these words that are read."""

_FACTS = ("Bootstrap", "nranks", "NCCL INFO Channel", "loss", "step", "iter", "epoch")


NOWHERE: Mapping[int, str] = {}


def diagnose(
    logs: Sequence[Log],
    known: elastic.Report = elastic.NOTHING,
    dumps: Sequence[Dump] = (),
    places: Mapping[int, str] = NOWHERE,
) -> list[Finding]:
    """The cause first; then what else went wrong by itself; then warnings. Empty for logs of a job that went well.

    ``known``: how the ranks ended, where that is known from elsewhere than the logs. ``dumps``: of the flight recorder.
    ``places``: where ranks were at that time.
    """
    signs: list[Sign] = []
    facts: list[Line] = []
    found: list[tracebacks.Traceback] = []
    reports = [known]
    for log in logs:
        exceptions = tracebacks.find(log)
        code = frozenset().union(*(one.masked for one in exceptions))  # lines of source code name errors, too
        signs += _signs(log, code)
        facts += [
            log.line(place) for place in sorted({place for word in _FACTS for place in log.having(word, FACTS)} - code)
        ]
        reports.append(elastic.find(log))
        found += exceptions
    return Case(signs, facts, found, elastic.merged(reports), recorder.judge(dumps, places)).findings()


def _signs(log: Log, code: frozenset[int]) -> list[Sign]:
    """Lines that hold a sign of the catalogue; each with the first kind that it fits."""
    kinds: dict[int, set[Kind]] = {}
    for word, meant in kinds_by_word().items():
        for place in log.having(word):
            if place not in code:
                kinds.setdefault(place, set()).update(meant)
    signs = []
    for place in sorted(kinds):
        line = log.line(place)
        for kind in sorted(kinds[place], key=LISTED.__getitem__):
            match = next((match for pattern in kind.patterns if (match := pattern.search(line.text))), None)
            if match is not None:
                signs.append(Sign(kind, line, match))
                break
    return signs
