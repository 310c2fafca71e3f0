"""Findings in words."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from ..protocol.events import Finding

WIDTH = 100
NONE = "No line tells of a fault."


def findings(found: Sequence[Finding]) -> str:
    """The cause first, each with what to do and its lines."""
    return "\n\n".join(map(finding, found)) if found else NONE


def finding(one: Finding) -> str:
    """``fault port-in-use: rank 0 cannot listen …``, then why, what to do, and the lines with their places."""
    lines = [
        fill(f"{one.severity} {one.code}: {one.sentence}", WIDTH, subsequent_indent="  ", break_on_hyphens=False),
        _part("why", one.cause),
        _part("do", one.remedy),
    ]
    lines += [f"  {line.file}:{line.number}: {line.text[:200]}" for line in one.evidence]
    return "\n".join(lines)


def _part(name: str, text: str) -> str:
    head = f"  {name:4}"
    return fill(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)
