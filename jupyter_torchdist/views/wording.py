"""Sizes, times, counts and tables in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from ..protocol.state import Stall


def size(count: int) -> str:
    """Bytes in a readable form: ``512 B``, ``1.5 kB``, ``256 MB`` (powers of ten, three digits)."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"


def duration(seconds: float) -> str:
    """Seconds in a readable form: ``0.05 s``, ``12.3 s``, ``4 min 05 s``, ``3 h 07 min``, ``2 d 04 h``."""
    seconds = max(seconds, 0.0)
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    for upper, unit, lower, below in ((3600, 60, 1, "min s"), (86400, 3600, 60, "h min"), (0, 86400, 3600, "d h")):
        if whole < upper or not upper:
            first, second = below.split()
            return f"{whole // unit} {first} {whole % unit // lower:02d} {second}"
    raise AssertionError(seconds)


def stalled(stall: Stall, now: float) -> str:
    """``stalled 34 s: rank 3 has not entered all_reduce #812; …``; ``now``: in seconds since the epoch."""
    return f"stalled {duration(now - stall.since)}: {stall.finding.sentence}"


def ago(then: float, now: float) -> str:
    """How long ago ``then`` was, both in seconds since the epoch; a time in the future is ``just now``."""
    passed = now - then
    if passed < 5:
        return "just now"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if passed >= length:
            return f"{int(passed // length)} {unit} ago"
    raise AssertionError(passed)


def count(number: int, noun: str, plural: str = "") -> str:
    """``1 rank``, ``8 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def others(number: int, noun: str) -> str:
    """After *the other*: ``host``, ``3 hosts``."""
    return noun if number == 1 else count(number, noun)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Left-aligned columns, separated by two blanks; the last column is not padded."""
    lines = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def first_line(text: str, limit: int = 200) -> str:
    """The first line of ``text``, cut with an ellipsis."""
    line = text.strip().split("\n", 1)[0]
    return line if len(line) <= limit else line[: limit - 1] + "…"


def indent(text: str, by: str = "  ") -> str:
    """``text`` with ``by`` before each line that is not empty."""
    return "\n".join(by + line if line else line for line in text.split("\n"))


def runs(ranks: Sequence[int], dash: str = "-", least: int = 3) -> list[str]:
    """``["0-6", "8", "9"]``: ascending numbers; ``least`` or more consecutive numbers become one range."""
    found: list[str] = []
    for _, run in groupby(enumerate(ranks), lambda at: at[1] - at[0]):
        words = [str(rank) for _, rank in run]
        found += [f"{words[0]}{dash}{words[-1]}"] if len(words) >= least else words
    return found


def ranks(numbers: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 2-5``; empty for none."""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(runs(numbers))}" if numbers else ""


def first_few(names: Iterable[str], most: int = 3) -> str:
    """``a, b, c and 4 more``."""
    found = list(names)
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")


_IN_SHELL = (("`%dist`", "`torchdist jobs`"), ("%dist ", "torchdist "), ("%%distribute --", "torchdist run --"))


def in_shell(text: str) -> str:
    """Our message ``text`` with shell commands (``torchdist jobs``) in place of notebook commands (``%dist``)."""
    for ours, theirs in _IN_SHELL:
        text = text.replace(ours, theirs)
    return text
