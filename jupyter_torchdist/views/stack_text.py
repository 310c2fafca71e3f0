"""Where the ranks of a job are, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .wording import indent, runs

SILENT = "no answer: it has only just begun, is stopped, or waits in the kernel for a disk or a device"


class Stack(Protocol):
    """One rank's stacks."""

    @property
    def rank(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def place(self) -> str: ...
    @property
    def text(self) -> str: ...


def grouped(stacks: Sequence[Stack]) -> str:
    """One line for each place, that of most ranks first: ``6 ranks (0-5): Cell In[12], line 14, in DataLoader``."""
    places: dict[str, list[int]] = {}
    for stack in stacks:
        places.setdefault(stack.place, []).append(stack.rank)
    ordered = sorted(places.items(), key=lambda item: (-len(item[1]), item[1]))
    return "\n".join(f"{_ranks(ranks)}: {place or SILENT}" for place, ranks in ordered)


def full(stacks: Sequence[Stack]) -> str:
    """Every rank with all its threads, the main thread last."""
    parts = []
    for stack in stacks:
        where = f"rank {stack.rank}" + (f" on {stack.host}" if stack.host else "")
        parts.append(f"{where}: {stack.place or SILENT}\n{indent(stack.text.strip())}".rstrip())
    return "\n\n".join(parts)


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} ranks ({', '.join(runs(numbers))})"
