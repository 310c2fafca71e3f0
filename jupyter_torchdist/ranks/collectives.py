"""A thread of the rank that reports when user code waits in a collective, and how many collectives it has entered.

It looks at the main thread four times a second (``streams/pace.py``), and reads counters once a second. It writes
events only when a rank waits:

* ``rank.waiting`` when this rank has been in one collective for two seconds, ``rank.resumed`` when that is over;
* ``rank.entered``, the number of collectives entered, while another rank of the node waits: so a reader knows which
  rank it waits for. A file per node has one byte per rank, which tells whether the rank waits.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ..protocol.disk import write_record
from ..protocol.paths import NodePaths
from .eventfile import EventFile
from .streams import flight, pace
from .streams.flight import Counts, Group

_EVERY = 4
"""So many looks at the pace are one check: a second."""

_LOOKS = 2
"""A rank reports that it waits after so many consecutive checks without progress."""


class CollectiveWatch:
    """Watches this process's collectives until ``stop``."""

    def __init__(self, events: EventFile, files: NodePaths, local_rank: int) -> None:
        self._events = events
        self._marks, self._tally = Marks(files.waiting, local_rank), Tally(files.tally, local_rank)
        self._pace = pace.Pace(files.pace, local_rank, _under_way)
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
        """Call ``told`` with the counts of each check, in the watch's thread."""
        self._told = told

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. No event is written after this."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(1.0)
        self._marks.clear()

    def _run(self) -> None:
        looks = 0
        while not self._stopped.wait(pace.PERIOD):
            try:
                self._pace.look()
                looks += 1
                if looks % _EVERY == 0:
                    self._look()
            except Exception:  # noqa: BLE001  # top level of this thread: the recorder cannot be read
                self._marks.clear()
                return

    def _look(self) -> None:
        counts = flight.counts()
        self._tally.note(sum(count.entered + count.ended for count in counts.values()))
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
        """Read the name of each new group once, while its entries are in the ring. Unnamed groups get no events."""
        for recorder in {group.recorder for group in counts if group not in self._names}:
            found = flight.names(recorder)
            new = [group for group in counts if group.recorder == recorder and group not in self._names]
            self._names |= {group: found.get(group, "") for group in new}

    def _still(self, counts: dict[Group, Counts]) -> list[Group]:
        """Groups with an unfinished collective and no progress since the last check, while this rank waits, too.

        A rank may leave a collective to Gloo's threads and do other work. So it counts as waiting only while its main
        thread sleeps in one call. NCCL's collectives run on the GPU, and later GPU work waits for them.
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
        """While another rank waits, report this rank's progress: at once, then in growing intervals."""
        peers, now = self._marks.others(), time.monotonic()
        if peers != self._peers:
            self._peers, self._asked, self._answer_at, self._answered = peers, now, now, None
        known = self._known()
        if any(peers) and now >= self._answer_at and known not in (None, self._answered):
            self._events.write("rank.entered", counts=known)
            self._answered, self._answer_at = known, now + (now - self._asked)

    def _known(self) -> dict[str, int] | None:
        """How many collectives of each group this rank has entered; None if a group has no name."""
        if not all(self._names.get(group) for group in self._counts):
            return None
        return {self._names[group]: self._counts[group].entered for group in sorted(self._counts)}


class Marks:
    """Which ranks of this node wait: a file with one byte per rank, written only by that rank. 0: it does not wait."""

    def __init__(self, path: Path, local_rank: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._own = local_rank
        self._waits = 0

    def set(self) -> None:
        """This rank waits. Each wait has a different number than the one before, so that others see a new wait."""
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
            return  # the disk is full: other ranks do not see the wait


class Tally:
    """How many collectives this rank has entered and ended, in a file with eight bytes per rank of this node.

    The agent reads it, to see that a rank makes progress.
    """

    def __init__(self, path: Path, local_rank: int) -> None:
        self._path, self._local_rank, self._noted = path, local_rank, 0

    def note(self, count: int) -> None:
        if count == self._noted:
            return
        self._noted = count
        write_record(self._path, 8, self._local_rank, count.to_bytes(8, "little"))


def _sleeps_at() -> str:
    """The system call in which the main thread waits for another thread: the same text during the same wait.

    Empty if the main thread does anything else, or if the kernel does not tell.
    """
    call = pace.system_call()
    return call if call.split(" ", 1)[0] == pace.FUTEX else ""


def _under_way() -> bool | None:
    """Whether this rank is in a collective; None if one may be on a GPU, where it takes no time of this thread."""
    counts = flight.counts()
    return None if any(group.recorder == flight.NCCL for group in counts) else any(c.under_way for c in counts.values())
