"""How options are listed: with the help beside the option, or below it if there is little room."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable

Rows = Iterable[tuple[str, str]]
"""Pairs of an option and its help."""

Layout = Callable[[Rows], list[str]]

COLUMN = 36
"""Width of the first of two columns, in characters."""

NARROW = 60
"""Characters. JupyterLab's contextual help is about as wide, and wraps longer lines."""


def beside(rows: Rows) -> list[str]:
    """Two columns; an option that is too long for the first column has its own line."""
    lines = []
    for written, help in rows:
        if len(written) > COLUMN:
            lines.append(f"  {written}")
        lines.append(f"  {written if len(written) <= COLUMN else '':<{COLUMN}} {help}")
    return lines


def below(rows: Rows) -> list[str]:
    """The help is below the option and indented; lines have at most ``NARROW`` characters, unless a word is longer."""
    lines = []
    for written, help in rows:
        lines += textwrap.wrap(written, NARROW, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        lines += textwrap.wrap(help, NARROW, initial_indent="      ", subsequent_indent="      ")
    return lines
