"""Search in the logs, the newest lines first, a bounded time each call."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..protocol.errors import UserError
from ..protocol.feed import LINE_LIMIT
from ..store import logs as store_logs
from . import segments
from .segments import Log

if sys.version_info >= (3, 11):
    from re import _constants as sre  # type: ignore[attr-defined]
    from re import _parser as sre_parser
else:
    import sre_constants as sre
    import sre_parse as sre_parser

BUDGET = 0.12
"""Seconds of one call, but for the line it is at."""

HITS = 500
"""Hits of one answer; where there are more, one asks again."""

SHOWN = 2000
"""Characters of a hit's line."""

_BLOCK = 256 * 1024
_PIECE = 4096
_OVERLAP = 256
_BEFORE = 200


@dataclass(frozen=True)
class Pattern:
    """What is searched: a text, or a regular expression that is found within single lines."""

    text: str
    case: bool
    regex: re.Pattern[str] | None = None

    @staticmethod
    def of(text: str, regex: bool, case: bool) -> Pattern:
        """Raises ``UserError`` for what is no regular expression, or one that may take forever."""
        if not regex:
            return Pattern(text if case else text.lower(), case)
        flags = 0 if case else re.IGNORECASE
        try:
            if _may_explode(sre_parser.parse(text, flags)):
                raise UserError(f"/{text}/ repeats a repetition, which may take forever", "simplify it, as (a+)+ to a+")
            return Pattern(text, case, re.compile(text, flags))
        except (re.error, RecursionError, OverflowError) as error:
            hint = "correct it, or search for plain text"
            raise UserError(f"/{text}/ is no regular expression: {error}", hint) from None

    def find(self, line: str) -> int:
        """Where in ``line`` it is found; -1 if it is not."""
        if self.regex is None:
            return (line if self.case else line.lower()).find(self.text)
        if len(line) <= _PIECE:
            match = self.regex.search(line)
            return match.start() if match else -1
        for begin in range(0, len(line), _PIECE):
            # A pattern that needs the square of a line's length is only bearable on pieces of a long line.
            first = max(0, begin - _OVERLAP)
            if match := self.regex.search(line[first : begin + _PIECE]):
                return first + match.start()
        return -1

    def maybe(self, text: str) -> bool:
        """Whether a block of lines can hold it at all."""
        return self.regex is not None or self.text in (text if self.case else text.lower())


_REPEATS = {sre.MAX_REPEAT, sre.MIN_REPEAT}


def _may_explode(parsed: Any) -> bool:
    """Whether an unbounded repetition holds nothing but parts that repeat or may be absent, as in ``(a+)+``."""
    for code, argument in parsed:
        if code in _REPEATS and argument[1] > 16 and _is_loose(argument[2]):
            return True
        if any(_may_explode(inner) for inner in _inner(code, argument)):
            return True
    return False


def _inner(code: Any, argument: Any) -> Iterator[Any]:
    if code in _REPEATS:
        yield argument[2]
    elif code is sre.SUBPATTERN:
        yield argument[3]
    elif code is sre.BRANCH:
        yield from argument[1]
    elif code in (sre.ASSERT, sre.ASSERT_NOT):
        yield argument[1]


def _is_loose(parsed: Any) -> bool:
    """Whether no part must be there exactly once and some part repeats."""
    repeats = False
    for code, argument in parsed:
        if code in _REPEATS:
            repeats = repeats or argument[1] > 16
        elif code is sre.SUBPATTERN:
            if not _is_loose(argument[3]):
                return False
            repeats = True
        elif code is sre.BRANCH:
            repeats = repeats or len({len(branch) for branch in argument[1]}) > 1 or any(map(_is_loose, argument[1]))
        elif code is not sre.AT:
            return False
    return repeats


class Search:
    """One call's work."""

    def __init__(self, logs: dict[str, Log], pattern: Pattern, at: dict[str, int] | None) -> None:
        self._logs, self._pattern = logs, pattern
        self._at = {
            name: min(max(0, at[name]), log.size()) if at and name in at else (0 if at else log.size())
            for name, log in logs.items()
        }
        self._until = time.monotonic() + BUDGET
        self._times = {name: log.written(self._at[name]) or 0.0 for name, log in logs.items() if self._at[name]}
        self._hits: list[dict[str, Any]] = []
        self._searched = 0

    def run(self) -> dict[str, Any]:
        """The answer: hits, newest first, and where the next call goes on (None: everything was searched)."""
        while self._times and not self._spent:
            name = max(self._times, key=lambda name: (self._times[name], name))
            before = self._at[name]
            self._block(name)
            self._searched += before - self._at[name]
            if self._at[name] <= 0:
                del self._times[name]
            else:
                self._times[name] = self._logs[name].written(self._at[name]) or 0.0
        self._hits.sort(key=lambda hit: hit["t"] or 0.0, reverse=True)
        left = any(self._at.values())
        return {"hits": self._hits, "at": self._at if left else None, "searched": self._searched}

    @property
    def _spent(self) -> bool:
        return len(self._hits) >= HITS or time.monotonic() >= self._until

    def _block(self, name: str) -> None:
        """Search the lines before ``at`` in one file, from the last one up."""
        log, end = self._logs[name], self._at[name]
        start = max(0, end - _BLOCK)
        data = log.read(start, end)
        if len(data) < end - start:  # the file has shrunk or is gone
            self._at[name] = 0
            return
        if start > 0:
            newline = data.find(b"\n", 0, len(data) - 1)
            skip = newline + 1 if newline >= 0 else segments.from_character(data)
            start, data = start + skip, data[skip:]
        text = store_logs.decode(data)
        if self._pattern.maybe(text):
            start += self._lines_of(log, start, data, text.split("\n"))
        self._at[name] = start

    def _lines_of(self, log: Log, start: int, data: bytes, texts: list[str]) -> int:
        """Search lines from the last one up; where the time was over, in bytes from ``start``."""
        bounds: list[tuple[int, int]] = []
        if len(data) > LINE_LIMIT and max(map(len, texts)) >= LINE_LIMIT // 4:  # maybe one that comes in pieces
            bounds = _lines(data)
            texts = [store_logs.decode(data[low:high]).removesuffix("\n") for low, high in bounds]
        elif not texts[-1]:
            texts.pop()
        for index in range(len(texts) - 1, -1, -1):
            found = self._pattern.find(texts[index])
            if found < 0 and time.monotonic() < self._until:
                continue
            bounds = bounds or _lines(data)
            low, high = bounds[index]
            if found >= 0:
                self._hit(log, start + low, start + high, texts[index], found)
            if self._spent:
                return low
        return 0

    def _hit(self, log: Log, start: int, end: int, line: str, found: int) -> None:
        shown = line if len(line) <= SHOWN else line[max(0, found - _BEFORE) :][:SHOWN]
        self._hits.append({"file": log.name, "start": start, "t": log.written(end), "text": shown})


def _lines(data: bytes) -> list[tuple[int, int]]:
    """Begin and end of each line, of a very long one in pieces."""
    found, low = [], 0
    while low < len(data):
        high = data.find(b"\n", low, low + LINE_LIMIT) + 1
        if high <= 0:
            high = low + segments.boundary(data[low : low + LINE_LIMIT + 4], LINE_LIMIT)
        found.append((low, high))
        low = high
    return found


def search(logs: dict[str, Log], question: dict[str, Any]) -> dict[str, Any]:
    """The answer to a ``search``. Raises ``UserError`` for a pattern that cannot be searched."""
    pattern = Pattern.of(str(question["pattern"]), bool(question.get("regex")), bool(question.get("case")))
    names = question.get("files") or list(logs)
    at = question.get("at")
    chosen = {name: logs[name] for name in names if name in logs}
    if at is not None:
        chosen = {name: log for name, log in chosen.items() if name in at}
        at = {str(name): int(offset) for name, offset in at.items()}
    return Search(chosen, pattern, at).run()
