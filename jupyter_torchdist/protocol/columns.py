"""How options are listed: beside what they are for, or above it where there is little room."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable

Rows = Iterable[tuple[str, str]]
"""What is written, and what it is for."""

Layout = Callable[[Rows], list[str]]

COLUMN = 36
"""Characters of the first of two columns."""

NARROW = 60
"""Characters; JupyterLab's contextual help is about as wide, and wraps what is wider."""


def beside(rows: Rows) -> list[str]:
    """Two columns; what is too long for the first has a line of its own."""
    lines = []
    for written, help in rows:
        if len(written) > COLUMN:
            lines.append(f"  {written}")
        lines.append(f"  {written if len(written) <= COLUMN else '':<{COLUMN}} {help}")
    return lines


def below(rows: Rows) -> list[str]:
    """What it is for stands below what is written, indented; no line is longer than ``NARROW`` if words allow it."""
    lines = []
    for written, help in rows:
        lines += textwrap.wrap(written, NARROW, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        lines += textwrap.wrap(help, NARROW, initial_indent="      ", subsequent_indent="      ")
    return lines
