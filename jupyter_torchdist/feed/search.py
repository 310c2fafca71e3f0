"""Search in the logs, newest lines first, in a bounded time per call."""

from __future__ import annotations

import time

from ..protocol.errors import UserError
from ..protocol.feed import LINE_LIMIT, Found, Hit, SearchAsked
from ..store import logs as store_logs
from ..store import segments
from ..store.segments import Log
from .pattern import Overtime, Pattern

BUDGET = 0.1
"""Seconds for one call."""

LINE_BUDGET = 0.06
"""CPU seconds that an expression may take on one line (``regex`` may exceed this by half)."""

HITS = 500
"""Largest number of hits in one answer; the client asks again for more."""

SHOWN = 2000
"""Largest number of characters of a line in a hit."""

_BLOCK = 1024 * 1024
_SLICE = 16 * 1024
"""A block is checked in slices of so many bytes. Only slices that may contain a hit are searched line by line."""
_BEFORE = 200


class Search:
    """The work of one call."""

    def __init__(self, logs: dict[str, Log], pattern: Pattern, at: dict[str, int] | None) -> None:
        self._logs, self._pattern = logs, pattern
        self._at = {
            name: min(max(0, at[name]), log.size()) if at and name in at else (0 if at else log.size())
            for name, log in logs.items()
        }
        self._until = time.monotonic() + BUDGET
        self._times = {name: log.written(self._at[name]) or 0.0 for name, log in logs.items() if self._at[name]}
        self._hits: list[Hit] = []
        self._searched = 0
        self._begun = False
        """Whether this call has finished a line. If so, a slow line is left to the next call, with its full time."""

    def run(self) -> Found:
        """The answer: hits, newest first, and the offsets for the next call (None: everything was searched)."""
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
        """Search a block of lines before offset ``_at`` in one file, from the last line to the first."""
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
        self._at[name] = start + (self._slices(log, start, data) if self._pattern.maybe(data) else 0)

    def _slices(self, log: Log, start: int, data: bytes) -> int:
        """Search the lines of ``data``, last line first. Returns the offset from ``start`` at which it stopped."""
        high = len(data)
        while high > 0:
            low = data.rfind(b"\n", 0, max(0, high - _SLICE)) + 1
            part = data[low:high]
            if self._pattern.maybe(part):
                left = self._lines_of(log, start + low, part, store_logs.decode(part).split("\n"))
                if left or self._spent:
                    return low + left
            high = low
        return 0

    def _lines_of(self, log: Log, start: int, data: bytes, texts: list[str]) -> int:
        """Search lines, last line first. Returns the offset from ``start`` at which it stopped."""
        bounds: list[tuple[int, int]] = []
        if len(data) > LINE_LIMIT and max(map(len, texts)) >= LINE_LIMIT // 4:  # maybe a line to split
            bounds = _lines(data)
            texts = [store_logs.decode(data[low:high]).removesuffix("\n") for low, high in bounds]
        elif not texts[-1]:
            texts.pop()
        for index in range(len(texts) - 1, -1, -1):
            try:
                found = self._pattern.find(texts[index], LINE_BUDGET)
            except Overtime:
                bounds = bounds or _lines(data)
                return self._give_up(log, start + bounds[index][0], bounds[index][1])
            self._begun = True
            if found < 0 and time.monotonic() < self._until:
                continue
            bounds = bounds or _lines(data)
            low, high = bounds[index]
            if found >= 0:
                self._hit(log, start + low, start + high, texts[index], found)
            if self._spent:
                return low
        return 0

    def _give_up(self, log: Log, start: int, end: int) -> int:
        """Handle a line that takes too long. Raises ``UserError`` if it was the first line of the call."""
        if self._begun:
            self._until = 0.0
            return end
        place = f"a line of rank {log.rank} (std{log.stream}, byte {start:,})"
        raise UserError(
            f"/{self._pattern.text}/ takes too long on {place}", "use a simpler expression, or search for plain text"
        )

    def _hit(self, log: Log, start: int, end: int, line: str, found: int) -> None:
        shown = line if len(line) <= SHOWN else line[max(0, found - _BEFORE) :][:SHOWN]
        self._hits.append({"file": log.name, "start": start, "t": log.written(end), "text": shown})


def _lines(data: bytes) -> list[tuple[int, int]]:
    """(begin, end) of each line; a very long line in pieces."""
    found, low = [], 0
    while low < len(data):
        high = data.find(b"\n", low, low + LINE_LIMIT) + 1
        if high <= 0:
            high = low + segments.boundary(data[low : low + LINE_LIMIT + 4], LINE_LIMIT)
        found.append((low, high))
        low = high
    return found


def search(logs: dict[str, Log], asked: SearchAsked) -> Found:
    """The answer to a ``search`` question. Raises ``UserError`` for an invalid or too slow pattern."""
    pattern = Pattern.of(asked.pattern, asked.regex, asked.case)
    chosen = {name: logs[name] for name in asked.files or logs if name in logs}
    if asked.at is not None:
        chosen = {name: log for name, log in chosen.items() if name in asked.at}
    return Search(chosen, pattern, asked.at).run()
