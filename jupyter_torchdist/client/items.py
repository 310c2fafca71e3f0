"""Reads the items that a job's generator yields, while it runs."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from .. import marshal
from ..protocol.disk import open_plain
from ..protocol.errors import UserError
from ..protocol.paths import JobPaths
from ..protocol.plan import Plan
from ..protocol.state import JobState

LENGTH = 8
"""Bytes of an item's length, big endian, before its pickle."""
PAUSE = 0.02
"""Seconds between two looks."""


class Followed(Protocol):
    """The part of a job's interface that is needed here."""

    paths: JobPaths
    plan: Plan

    @property
    def state(self) -> JobState: ...

    def revive(self) -> None: ...


def follow(job: Followed, tick: Callable[[JobState], None]) -> Iterator[Any]:
    """Each item as soon as it is there: a list by rank with ``--collect all``, else rank 0's.

    ``tick`` is called with every state. Raises ``UserError`` if ranks yielded different numbers of items, ``JobLost``.
    """
    every = job.plan.collect == "all"
    ranks = [_Items(job, rank) for rank in (range(job.plan.world_size) if every else range(1))]
    while True:
        state = job.state
        for rank in ranks:
            rank.read()
        while all(rank.items for rank in ranks):
            row = [rank.items.popleft() for rank in ranks]
            yield row if every else row[0]
        tick(state)
        if state.final:
            break
        job.revive()
        time.sleep(PAUSE)
    counts = [rank.count for rank in ranks]
    if state.state == "succeeded" and len(set(counts)) > 1:
        most, least = counts.index(max(counts)), counts.index(min(counts))
        raise UserError(
            f"rank {most} yielded {counts[most]} items, and rank {least} {counts[least]}",
            "yield on every rank as often, or take rank 0's items only: collect='rank0'",
        )


class _Items:
    """The items of one rank."""

    def __init__(self, job: Followed, rank: int) -> None:
        self.items: deque[Any] = deque()
        self.count = 0
        self._paths, self._rank = job.paths, rank
        self._node = job.plan.node_of(rank).name
        self._offset, self._rest = 0, b""

    def read(self) -> None:
        """Take what was written since. Raises ``RankFailed`` for an item that cannot be rebuilt here."""
        path = self._paths.node(self._node).items(self._rank)
        if not path.exists() or os.stat(path).st_size == self._offset:
            return
        with open_plain(path) as file:
            file.seek(self._offset)
            self._rest += file.read()
            self._offset = file.tell()
        while len(self._rest) >= LENGTH:
            end = LENGTH + int.from_bytes(self._rest[:LENGTH], "big")
            if len(self._rest) < end:
                break
            self.items.append(marshal.load_item(self._rest[LENGTH:end], self._paths.job, vars(sys.modules["__main__"])))
            self.count += 1
            self._rest = self._rest[end:]
