"""The pattern of a search, and the time that matching a line may take.

Expressions have the syntax of Python's ``re``, which reports their errors. They are run by ``regex``: it gives the
same results except for rare letters in ``\\w`` and ``\\s``, can release the GIL, and has a timeout.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import regex

from ..protocol.errors import UserError
from ..store import logs

if sys.version_info >= (3, 11):
    from re import _constants as sre  # type: ignore[attr-defined]
    from re import _parser as sre_parser
else:
    import sre_constants as sre
    import sre_parse as sre_parser

LONGEST = 2000
"""Largest length of an expression in characters."""

LARGEST = 20_000
"""Largest length of an expression with its repetitions expanded, since ``regex`` does expand them."""

PIECE = 4096
"""A long line is searched in pieces of so many characters."""

_OVERLAP = 256
_BOUND = 1_000_000
"""Up to this number of steps (some ms) no timeout is used: it would cost more than a usual search."""

_SHORT = 4
"""For texts up to this length, lower-casing the data first is faster than a case-insensitive search."""

_UNCOUNTED = 16
"""More repetitions than this count as unlimited."""

_BRACE = re.compile(r"(\\N\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|\{(?:\d+(?:,\d*)?|,\d*)\})|\{", re.DOTALL)
_IN_SET = re.compile(r"(\\.|[^\]\\])(?:(-)(\\.|[^\]\\]))?", re.DOTALL)
"""A character of a set, or a range."""


class Overtime(Exception):
    """The expression exceeded its time on a line."""


@dataclass(frozen=True)
class Cost:
    """At most ``factor * n ** power`` ways to match at one offset of ``n`` characters. ``size``: expanded length."""

    factor: float
    power: float
    size: int

    def steps(self, length: int) -> float:
        """Upper bound of the steps of a search in a line of this length."""
        try:
            return self.factor * math.pow(max(2, length), self.power + 1)
        except OverflowError:
            return float("inf")


@dataclass(frozen=True)
class Pattern:
    """The pattern of a search: a text, or a regular expression that matches within single lines."""

    text: str
    case: bool
    regex: regex.Pattern[str] | None = None
    cost: Cost | None = None
    needed: Callable[[bytes], bool] | None = None
    """Quick check whether ASCII lines can contain a match; None: each line must be searched."""

    @staticmethod
    def of(text: str, is_regex: bool, case: bool) -> Pattern:
        """Raises ``UserError`` if the text is not a regular expression, or too large."""
        if is_regex:
            return _expression(text, case)
        return Pattern(text if case else text.lower(), case, needed=_finder(text, case))

    def find(self, line: str, seconds: float) -> int:
        """Index of the first match in ``line``, or -1. Raises ``Overtime`` after about twice ``seconds``."""
        if self.regex is None:
            return (line if self.case else line.lower()).find(self.text)
        if len(line) <= PIECE:
            return self._search(line, seconds)
        until = time.process_time() + seconds
        for begin in range(0, len(line), PIECE):
            # A pattern with quadratic cost is fast enough only on pieces of a long line, which share its time.
            first = max(0, begin - _OVERLAP)
            if (found := self._search(line[first : begin + PIECE], until - time.process_time())) >= 0:
                return first + found
            if time.process_time() >= until and first + PIECE < len(line) and self._is_slow(PIECE):
                raise Overtime
        return -1

    def _is_slow(self, length: int) -> bool:
        assert self.cost is not None
        return self.cost.steps(length) > _BOUND

    def _search(self, text: str, seconds: float) -> int:
        assert self.regex is not None
        if not self._is_slow(len(text)):
            match = self.regex.search(text)
        else:
            try:
                match = self.regex.search(text, timeout=max(seconds, 0.001), concurrent=True)
            except TimeoutError:
                raise Overtime from None
        return match.start() if match else -1

    def maybe(self, data: bytes) -> bool:
        """Whether lines (bytes of the file) can contain a match. With this check most of a log is skipped quickly."""
        if self.needed is not None and data.isascii():
            return self.needed(data)
        if self.regex is not None:
            return True
        text = logs.decode(data)
        return self.text in (text if self.case else text.lower())


@lru_cache(maxsize=64)
def _expression(text: str, case: bool) -> Pattern:
    hint = "correct it, or search for plain text"
    flags = 0 if case else re.IGNORECASE
    too_large = UserError(f"/{_short(text)}/ is too large", "use a shorter expression, or search for plain text")
    if len(text) > LONGEST:
        raise too_large
    try:
        literal = _plain(text)
        re.compile(literal, flags)
        parsed = sre_parser.parse(literal, flags)
        cost = _cost(parsed)
        if cost.size > LARGEST:
            raise too_large
        needed = _finder(_literal(parsed), not parsed.state.flags & re.IGNORECASE)
        return Pattern(text, case, regex.compile(literal, flags | regex.VERSION0), cost, needed)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise UserError(f"/{_short(text)}/ is not a regular expression: {error}", hint) from None


def _finder(text: str, case: bool) -> Callable[[bytes], bool] | None:
    """A function that finds an ASCII text in ASCII bytes (1 to 3 GB/s); None if ``text`` is empty or not ASCII."""
    if not text or not text.isascii():
        return None
    needle = text.encode()
    if case:
        return lambda data: needle in data
    if len(needle) <= _SHORT:
        lower = needle.lower()
        return lambda data: lower in data.lower()
    # Not ``re``: its case-insensitive search takes twenty times as long.
    anyhow = regex.compile(regex.escape(needle, literal_spaces=True), regex.IGNORECASE)
    return lambda data: anyhow.search(data) is not None


def _literal(parsed: Any) -> str:
    """The longest text that every match contains, found at the top level of the expression."""
    if parsed.state.flags & ~(re.IGNORECASE | re.UNICODE):  # flags in the expression: (?x), (?a)…
        return ""
    runs, run = [""], ""
    for code, argument in parsed:
        run = run + chr(argument) if code is sre.LITERAL and argument < 128 else ""
        runs.append(run)
    return max(runs, key=len)


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:79] + "…"


def _plain(text: str) -> str:
    """Escape what ``re`` takes literally and ``regex`` may not: braces that are not repetitions, and signs in sets
    such as ``[[a]`` and ``[a&&b]``, of which ``re`` warns, too.
    """
    return _BRACE.sub(lambda found: _plain_set(found[1]) if found[1] else r"\{", text)


def _plain_set(part: str) -> str:
    if not part.startswith("["):
        return part
    begin = 2 if part.startswith("[^") else 1
    return part[:begin] + _IN_SET.sub(_escaped, part[begin:])


def _escaped(found: re.Match[str]) -> str:
    first, dash, last = (f"\\{sign}" if sign and sign in "[-&~|" else sign for sign in found.groups(""))
    return first + dash[-1:] + last


def _cost(parsed: Any) -> Cost:
    """The cost of a sequence: the product of the costs of its parts."""
    factor, power, size = 1.0, 0.0, 0
    for part in (_part(code, argument) for code, argument in parsed):
        factor, power, size = min(factor * part.factor, 1e300), power + part.power, size + part.size
    return Cost(factor, power, size)


def _part(code: Any, argument: Any) -> Cost:
    inner = [_cost(parsed) for parsed in _inner(code, argument)]
    if code in _REPEATS:
        return _repeated(inner[0], argument[0], argument[1])
    if code is sre.BRANCH:
        factor, power = sum(one.factor for one in inner), max(one.power for one in inner)
        return Cost(factor, power, sum(one.size for one in inner))
    if code is sre.GROUPREF_EXISTS:
        return Cost(sum(one.factor for one in inner), max(one.power for one in inner), sum(one.size for one in inner))
    return inner[0] if inner else Cost(1.0, 0.0, 1)


def _repeated(body: Cost, least: int, most: int) -> Cost:
    bounded = most if most <= _UNCOUNTED else least
    size = body.size * max(least, most if most <= LARGEST else 0, 1)
    if body.factor > 1 or body.power > 0:
        # Each repetition may match in several ways. Without a limit on repetitions there is none on the ways.
        ways = min(body.factor, 1e30) ** min(bounded, 10) if most <= _UNCOUNTED else float("inf")
        return Cost(min(ways * (most - least + 1), float("inf")), body.power * max(1, bounded), size)
    return Cost(most - least + 1.0, 0.0, size) if most - least <= _UNCOUNTED else Cost(1.0, 1.0, size)


_REPEATS = {sre.MAX_REPEAT, sre.MIN_REPEAT, getattr(sre, "POSSESSIVE_REPEAT", sre.MAX_REPEAT)}


def _inner(code: Any, argument: Any) -> Iterator[Any]:
    if code in _REPEATS:
        yield argument[2]
    elif code is sre.SUBPATTERN:
        yield argument[3]
    elif code is sre.BRANCH:
        yield from argument[1]
    elif code in (sre.ASSERT, sre.ASSERT_NOT):
        yield argument[1]
    elif code is getattr(sre, "ATOMIC_GROUP", None):
        yield argument
    elif code is sre.GROUPREF_EXISTS:
        yield from (branch for branch in argument[1:] if branch is not None)
