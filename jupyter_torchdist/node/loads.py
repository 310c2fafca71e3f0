"""CPU time and memory of ranks and their children, read from ``/proc`` at a low cost.

Two steps are expensive: finding children reads the state of every process of the machine, and the private memory of a
child needs a walk through its page tables. Each step may use ``SHARE`` of a core, however large machine and job are.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..protocol.process import ProcessId, stat_fields

SHARE = 0.002
"""Share of one core."""

LOOK_SECONDS = 2.0
"""Approximate time from one measurement to the next."""

BUSY = 5.0
"""Per cent of a core from which a rank works. A rank that waits uses a third of one."""

MOVES = 100_000
"""Bytes a second, read and written, from which a rank works."""

_TICKS = os.sysconf("SC_CLK_TCK")

Key = tuple[int, int]
"""A process: pid and start ticks."""


@dataclass(frozen=True)
class Load:
    """Load of one rank. ``cpu``: per cent of a core since the last look, None at the first. ``memory``: bytes."""

    cpu: float | None
    works: bool | None
    """Whether it computes, or reads and writes files or connections, or wants to; None at the first look."""
    memory: int
    pids: frozenset[int]
    """The rank and its children."""


class Used(NamedTuple):
    """What a process has used since its start: CPU time in clock ticks, and bytes that were read and written."""

    ticks: int
    moved: int
    wants: bool
    """Whether its main thread now waits for a processor or a disk, if it does not have one: on a busy machine."""


class Loads:
    """Measures the load of ranks repeatedly. Keeps the counters of the last measurement."""

    def __init__(self) -> None:
        self._used: dict[Key, Used] = {}
        self._looked = 0.0
        self._search, self._walks = Seldom(), Seldom()
        self._owners: dict[Key, Key] = {}
        self._own: dict[Key, tuple[float, int]] = {}
        """Per child: when its private memory was measured, and the result in bytes."""

    def look(self, ranks: Collection[ProcessId], now: float) -> dict[ProcessId, Load]:
        """The load of each rank that is alive. ``now``: seconds on a monotonic clock."""
        leaders = {_key(rank) for rank in ranks}
        owners = self._owners_of(leaders, now)
        before, self._used = self._used, {key: used for key in owners if (used := _used(key)) is not None}
        passed, self._looked = now - self._looked, now
        self._ask_children([key for key in self._used if key not in leaders], now)
        families: dict[Key, list[Key]] = {}
        for key in self._used:
            families.setdefault(owners[key], []).append(key)
        alive = [rank for rank in ranks if _key(rank) in self._used]
        return {rank: self._load(_key(rank), families[_key(rank)], before, passed) for rank in alive}

    def _load(self, leader: Key, family: list[Key], before: dict[Key, Used], passed: float) -> Load:
        """A process counts from its second measurement on: a child may have run for long before it was found.

        CPU time of a child between the last measurement and its exit is not counted.
        """
        known = [(self._used[key], before[key]) for key in family if key in before]
        cpu = works = None
        if leader in before and passed > 0:
            cpu = 100 * sum(now.ticks - then.ticks for now, then in known) / _TICKS / passed
            moved = sum(now.moved - then.moved for now, then in known) / passed
            works = cpu >= BUSY or moved >= MOVES or any(now.wants for now, _ in known)
        memory = _memory(leader[0]) + sum(self._own[key][1] for key in family if key in self._own)
        return Load(cpu, works, memory, frozenset(pid for pid, _ in family))

    def _owners_of(self, leaders: set[Key], now: float) -> dict[Key, Key]:
        """For each process known to belong to one of these ranks, its leader (the rank)."""
        if self._search.due(now):
            with self._search.spending(now):
                self._owners = _owners(leaders)
        kept = {key: leader for key, leader in self._owners.items() if leader in leaders}
        return {**kept, **{leader: leader for leader in leaders}}

    def _ask_children(self, children: list[Key], now: float) -> None:
        """Measure the private memory of some children, beginning with the oldest measurements."""
        self._own = {key: self._own[key] for key in children if key in self._own}
        if not children or not self._walks.due(now):
            return
        with self._walks.spending(now):
            until = time.thread_time() + SHARE * LOOK_SECONDS
            for key in sorted(children, key=lambda key: self._own.get(key, (0.0, 0))[0]):
                self._own[key] = now, _private(key[0])
                if time.thread_time() >= until:
                    break


class Seldom:
    """Decides when an expensive step may run again, so that it uses at most ``SHARE`` of a core."""

    def __init__(self) -> None:
        self._again = float("-inf")

    def due(self, now: float) -> bool:
        return now >= self._again

    @contextlib.contextmanager
    def spending(self, now: float) -> Iterator[None]:
        began = time.thread_time()
        yield
        self._again = now + (time.thread_time() - began) / SHARE


def _key(rank: ProcessId) -> Key:
    return rank.pid, rank.ticks


def _owners(leaders: set[Key]) -> dict[Key, Key]:
    """The leader of each process that is in a leader's session, or descends from a process in it."""
    found: dict[int, tuple[int, int, int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = stat_fields(int(entry))
                found[int(entry)] = int(fields[1]), int(fields[3]), int(fields[19])
    by_pid = {pid: (pid, start) for pid, start in leaders}
    owned = [((pid, start), _leader(pid, found, by_pid)) for pid, (_, _, start) in found.items()]
    return {key: leader for key, leader in owned if leader is not None}


def _leader(pid: int, found: dict[int, tuple[int, int, int]], leaders: dict[int, Key]) -> Key | None:
    for _ in range(len(found)):  # bounded: entries read at different times could form a cycle
        if pid in leaders or pid not in found:
            return leaders.get(pid)
        parent, session, _ = found[pid]
        if session in leaders:
            return leaders[session]
        pid = parent
    return None


def _used(key: Key) -> Used | None:
    """None when the process is gone or a zombie."""
    try:
        fields = stat_fields(key[0])
        alive = fields[0] not in "ZX" and int(fields[19]) == key[1]
        return Used(int(fields[11]) + int(fields[12]), _moved(key[0]), fields[0] in "RD") if alive else None
    except (OSError, ValueError, IndexError):
        return None


def _moved(pid: int) -> int:
    """Bytes of all calls of read and write; 0 where the kernel does not tell (proc(5), ``io``)."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith((b"rchar:", b"wchar:")))
    except (OSError, ValueError, IndexError):
        return 0


def _memory(pid: int) -> int:
    """Bytes of a rank: its anonymous pages and its shared memory, which the kernel has counted already.

    Not the resident size (RSS): that counts libraries, which all ranks map, once per rank. Not the proportional size
    (Pss): for it the kernel walks through all page tables, and the rank cannot map memory meanwhile.
    Pages that a rank shares with its zygote and never wrote to are included, as they would be in an unforked process.
    """
    return sum(_lines(f"/proc/{pid}/status", (b"RssAnon:", b"RssShmem:")))


def _private(pid: int) -> int:
    """Bytes of a child that no other process maps.

    The anonymous pages of a forked DataLoader worker include its rank's whole data set, and batches in transit are
    mapped by both. A plain sum would count them per worker. Only the page tables tell which pages are private.
    """
    return sum(_lines(f"/proc/{pid}/smaps_rollup", (b"Private_Dirty:",)))


def _lines(path: str, names: tuple[bytes, ...]) -> Iterator[int]:
    """The values in bytes of the lines with these names; nothing when the process is gone."""
    try:
        with open(path, "rb") as file:
            lines = file.readlines()
    except OSError:
        return
    for line in lines:
        if line.startswith(names):
            with contextlib.suppress(ValueError, IndexError):
                yield int(line.split()[1]) * 1024
