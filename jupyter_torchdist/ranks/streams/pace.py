"""What a rank does, looked at four times a second: it waits in a collective, for data or for a socket, or it works.

The shares of the last minute are in a file with ``RECORD`` bytes for each rank of the node: JSON, filled with blanks.
The agent reads it with the gauges. A look takes about 60 microseconds, 0.03 % of the time.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...protocol import codec
from ...protocol.disk import read_records, write_record
from ...protocol.gauges import PLACE, Gauges
from ...usercode.frames import OURS, is_users, places_of_main
from ...usercode.stacks import LOADER

PERIOD = 0.25
"""Seconds between two looks."""

KEPT = 240
"""How many looks count: a minute."""

RECORD = 1024

_EVERY = 8
"""Looks between two writes."""

FUTEX, _RECEIVES, _READS = {
    "x86_64": ("202", frozenset(("45", "47", "7", "271", "42")), "0"),
    "aarch64": ("98", frozenset(("207", "212", "73", "203")), "63"),
}.get(os.uname().machine, ("", frozenset[str](), ""))
"""Numbers of system calls: futex(2), in which a thread waits for other threads; recvfrom, recvmsg, poll, ppoll and
connect; read."""


class Pace:
    """Of this process's main thread. ``under_way``: whether a collective is; None if that cannot be known (NCCL)."""

    def __init__(self, path: Path, local_rank: int, under_way: Callable[[], bool | None]) -> None:
        self._path, self._local_rank, self._under_way = path, local_rank, under_way
        self._looks: deque[tuple[str, str]] = deque(maxlen=KEPT)
        self._count = 0
        self._knows = True

    def look(self) -> None:
        """Note what the main thread does now, and write the shares now and then."""
        loads, place = False, ""
        for file, line in places_of_main():
            if place and file.startswith(OURS):  # what runs the user's code
                break
            if not place and is_users(file):
                place = f"{file}, line {line}"
            loads = loads or LOADER in file
        self._looks.append(("loads" if loads else self._doing(), place))
        self._count += 1
        if self._count % _EVERY == 0:
            self._write()

    def _doing(self) -> str:
        call = system_call().split(" ", 2)
        if call[0] == FUTEX:
            found = self._under_way()
            self._knows = found is not None
            return "waits" if found else "works"
        if call[0] in _RECEIVES or (call[0] == _READS and _is_socket(call[1])):
            return "network"
        return "works"

    def shares(self) -> dict[str, Any]:
        """Fields of ``Gauges``."""
        count = len(self._looks)
        does = Counter(doing for doing, _ in self._looks)
        places = Counter(place for doing, place in self._looks if doing != "waits" and place)
        place = places.most_common(1)[0][0] if places else ""
        found = {name: round(100 * does[name] / count) for name in ("waits", "loads", "network")}
        return {"looks": count, **found, "waits": found["waits"] if self._knows else None, "place": place[:PLACE]}

    def _write(self) -> None:
        text = codec.dumps(self.shares()).encode("ascii")
        write_record(self._path, RECORD, self._local_rank, (text if len(text) <= RECORD else b"").ljust(RECORD))


def read(path: Path, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
    """By rank, those fields of ``Gauges``. User code can write into the file: what is malformed is left out."""
    found: dict[int, dict[str, Any]] = {}
    for rank, record in read_records(path, RECORD, ranks).items():
        with contextlib.suppress(ValueError, AttributeError, RecursionError):
            told = Gauges.from_json(codec.loads(record.strip()))
            found[rank] = {name: getattr(told, name) for name in ("looks", "waits", "loads", "network", "place")}
    return found


def system_call() -> str:
    """The main thread's system call and its arguments, as proc(5) has them. Empty if the kernel does not tell."""
    try:
        fd = os.open(f"/proc/self/task/{os.getpid()}/syscall", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, 256).decode("ascii")
    except OSError:
        return ""
    finally:
        os.close(fd)


def _is_socket(descriptor: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{int(descriptor, 16)}").startswith("socket:")
    except (OSError, ValueError):
        return False
