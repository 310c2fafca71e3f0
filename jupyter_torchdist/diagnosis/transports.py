"""By what the ranks of a node reach each other and the other nodes, as the lines of NCCL's log say it (INFO)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

MARK = b"NCCL INFO Channel"
"""Only lines with it tell."""

MOST = 4
"""Transports that are named, the most frequent first."""

_VIA = re.compile(r"NCCL INFO Channel \S+ ?: \d+\[\w+\] -> \d+\[\w+\](?: \[\w+\])? via (\S.*)")
_ENDS = re.compile(r" comm 0x.*|/read\b.*|/Shared\b|/\d+\[\w+\].*|\(\d+\)")
"""Of the text after ``via``: the communicator, how a copy is made, a peer between the two, the rank of a proxy."""

_OUTSIDE = ("NET/", "COLLNET/", "P2P/MNNVL")
"""MNNVL is NVLink between nodes."""


def of(lines: Iterable[str], alone: bool) -> tuple[list[str], list[str]]:
    """(between ranks of this node, to other nodes). ``alone``: the job has no other node.

    The numbers of ranks in a line are those of its communicator, which the line does not name. So a network that is
    used inside one of several nodes counts as one to the others.
    """
    inside: Counter[str] = Counter()
    outside: Counter[str] = Counter()
    for line in lines:
        if match := _VIA.search(line):
            via = _worded(match[1])
            (outside if via.startswith(_OUTSIDE) and not alone else inside)[via] += 1
    return _first(inside), _first(outside)


def _worded(via: str) -> str:
    """``P2P/IPC``, ``SHM``, ``NET/IB/0/GDRDMA``."""
    cut = _ENDS.sub("", via.strip())
    return "SHM" if cut.startswith("SHM") else cut[:40]


def _first(counts: Counter[str]) -> list[str]:
    return [via for via, _ in counts.most_common(MOST)]
