"""A thread of the rank that says when user code waits in a collective, and how far this rank has come.

It looks once a second at counters. Two events come of that, none of them while a job goes its way:

* ``rank.waiting`` when this rank has been in one collective for two seconds, ``rank.resumed`` when that is over;
* ``rank.entered``, how many collectives it has entered, while another rank of the node waits: from that a reader
  knows for whom. That a rank waits stands in a file of the node, one byte a rank.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path

from . import flight
from .eventfile import EventFile
from .flight import Counts, Group

_PERIOD = 1.0
"""Seconds between two looks."""

_LOOKS = 2
"""At so many looks, one after the other, a rank must stand still before it says that it waits."""

_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(platform.machine())
"""The system call in which a thread waits for other threads, as it does for Gloo's."""


class CollectiveWatch:
    """Watches this process's collectives until ``stop``."""

    def __init__(self, events: EventFile, marks: Marks) -> None:
        self._events = events
        self._marks = marks
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchdist-collectives", daemon=True)
        self._names: dict[Group, str] = {}
        self._counts: dict[Group, Counts] = {}
        self._place = ""
        self._looks = 0
        self._waits_in: Group | None = None
        self._peers = b""
        self._asked = self._answer_at = 0.0
        self._answered: dict[str, int] | None = None
        self._told: Callable[[dict[Group, Counts]], None] | None = None

    def tell(self, told: Callable[[dict[Group, Counts]], None]) -> None:
        """Call this with the counts of each look, in the watch's thread."""
        self._told = told

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Nothing is written after this."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_PERIOD)
        self._marks.clear()

    def _run(self) -> None:
        while not self._stopped.wait(_PERIOD):
            try:
                self._look()
            except Exception:  # noqa: BLE001  # this thread's edge: a torch whose recorder we cannot read
                self._marks.clear()
                return

    def _look(self) -> None:
        counts = flight.counts()
        if self._told is not None:
            self._told(counts)
        self._learn_names(counts)
        still = self._still(counts)
        self._counts = counts
        self._looks = self._looks + 1 if still else 0
        if self._waits_in is not None and self._waits_in not in still:
            self._resumed()
        if self._waits_in is None and self._looks >= _LOOKS:
            self._say(still)
        self._answer()

    def _learn_names(self, counts: dict[Group, Counts]) -> None:
        """Once for each group, while its entries are in the ring; of one that is not found nothing is ever said."""
        for recorder in {group.recorder for group in counts if group not in self._names}:
            found = flight.names(recorder)
            new = [group for group in counts if group.recorder == recorder and group not in self._names]
            self._names |= {group: found.get(group, "") for group in new}

    def _still(self, counts: dict[Group, Counts]) -> list[Group]:
        """Groups with a collective under way in which nothing has moved since the last look, nor has this rank.

        A rank may leave a collective to Gloo's threads and do something else: it is said to wait only while its main
        thread sleeps at one place. NCCL's run on the GPU, where what comes after them waits.
        """
        under_way = [group for group, count in counts.items() if count.under_way]
        place = _sleeps_at() if any(group.recorder != flight.NCCL for group in under_way) else ""
        asleep, self._place = place != "" and place == self._place, place
        return [
            group
            for group in under_way
            if counts[group] == self._counts.get(group) and (asleep or group.recorder == flight.NCCL)
        ]

    def _say(self, still: list[Group]) -> None:
        for group in still:
            collective = flight.oldest(group)
            if collective is not None and not self._stopped.is_set():
                self._waits_in = group
                counts = self._known() or {}
                members = flight.members(collective.group)
                self._events.write("rank.waiting", **vars(collective), members=members, counts=counts)
                self._marks.set()
                return

    def _resumed(self) -> None:
        self._waits_in = None
        self._marks.clear()
        self._events.write("rank.resumed")

    def _answer(self) -> None:
        """Who waits asks how far this rank has come: it is told at once, and then ever more seldom."""
        peers, now = self._marks.others(), time.monotonic()
        if peers != self._peers:
            self._peers, self._asked, self._answer_at, self._answered = peers, now, now, None
        known = self._known()
        if any(peers) and now >= self._answer_at and known not in (None, self._answered):
            self._events.write("rank.entered", counts=known)
            self._answered, self._answer_at = known, now + (now - self._asked)

    def _known(self) -> dict[str, int] | None:
        """How many collectives of each group this rank has entered; None when a group has no name."""
        if not all(self._names.get(group) for group in self._counts):
            return None
        return {self._names[group]: self._counts[group].entered for group in sorted(self._counts)}


class Marks:
    """Which ranks of this node wait: one byte for each, written by it alone; 0 is that it does not."""

    def __init__(self, path: Path, local_rank: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._own = local_rank
        self._waits = 0

    def set(self) -> None:
        """This rank waits: another number than the last time, so that others see that it is a new wait."""
        self._waits = self._waits % 255 + 1
        self._write(self._waits)

    def clear(self) -> None:
        self._write(0)

    def others(self) -> bytes:
        """The bytes of the other ranks."""
        marks = os.pread(self._fd, 4096, 0)
        return marks[: self._own] + marks[self._own + 1 :]

    def _write(self, mark: int) -> None:
        try:
            os.pwrite(self._fd, bytes([mark]), self._own)
        except OSError:
            return  # a full disk: the others are not asked


def _sleeps_at() -> str:
    """Where the main thread waits for another thread: the same words for as long as it is the same wait.

    Empty while it does anything else, and where the kernel does not tell.
    """
    try:
        call = Path(f"/proc/self/task/{os.getpid()}/syscall").read_text()
    except OSError:
        return ""
    return call if call.split(" ", 1)[0] == _FUTEX else ""
