"""Which job has which GPUs of this machine, or waits for them: one file for each job, in a directory of all users.

A job's file holds what it asks for and, once it has them, its GPUs. Whoever drives or runs the job keeps the file
locked until the job ends: a file that nobody locks counts for nothing. The order is that of the files' change times,
which no user can set. A job of this machine has a file of its client and driver, one from elsewhere that of the agent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .. import codec
from ..paths import is_safe, queue_dir, user_name
from ..plan import Gpu
from ..typed import Record

YOUNG = 10.0
"""Seconds within which a driver locks the file of a new job."""

TICK = 0.02
"""Seconds in which the clock of the file system moves on: then every file that is older can be seen."""

_ODD = re.compile(r"[^\w.@-]")
"""Characters of an origin that are not shown: another user wrote it."""

TRIES = 10
"""How often a lock is tried: others lock the file for an instant, to see whether somebody holds it."""

LARGEST = 64 * 1024
"""Bytes of a file that are read: another user wrote it."""


@dataclass(frozen=True)
class Asked(Record):
    """What a job asks for: ``count`` of the GPUs with these UUIDs. ``own``: processes that do not make a GPU busy."""

    job: str
    count: int
    gpus: tuple[str, ...]
    own: tuple[int, ...] = ()
    origin: str = ""
    """Who started it from where, ``alice@laptop``; empty for a job of this machine."""


@dataclass(frozen=True)
class Granted(Record):
    """The GPUs that a job has."""

    granted: tuple[str, ...]


@dataclass(frozen=True)
class Ticket:
    """A job's file. ``changed`` in nanoseconds since the epoch."""

    asked: Asked
    granted: tuple[str, ...]
    user: int
    changed: int

    @property
    def whose(self) -> str:
        """``20260102-030405-0a0b0c``, of another user or machine ``20260102-030405-0a0b0c of alice``."""
        if self.asked.origin:
            return f"{self.asked.job} of {_ODD.sub('', self.asked.origin)[:100]}"
        if self.user == os.getuid():
            return self.asked.job
        return f"{self.asked.job} of {user_name(self.user)}"


def enter(asked: Asked) -> bool:
    """Take the next place. False where the directory cannot be used, so that no job has a place."""
    with contextlib.suppress(OSError):
        queue_dir().mkdir()
        queue_dir().chmod(0o1777)
    directory = _directory()
    if directory is None:
        return False
    _clean(directory)
    try:
        fd = os.open(directory / asked.job, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except OSError:
        return False
    os.fchmod(fd, 0o644)  # others read it, whatever the umask says
    _write(fd, asked)
    time.sleep(TICK)
    return True


def grant(job: str, gpus: Sequence[str]) -> None:
    """Write that the job has these GPUs. A job without a file needs no one's leave."""
    with contextlib.suppress(OSError):
        _write(os.open(_path(job), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), Granted(tuple(gpus)))


def leave(job: str) -> None:
    """Give up the place, or the GPUs."""
    with contextlib.suppress(OSError):
        os.unlink(_path(job))


def hold(job: str) -> int | None:
    """Lock the job's file, as long as the descriptor is open; None if there is none."""
    try:
        fd = os.open(_path(job), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    for _ in range(TRIES):
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            break
        time.sleep(TICK)
    return fd


def counting() -> list[Ticket]:
    """The files that count, in their order."""
    directory = _directory()
    try:
        names = [] if directory is None else os.listdir(directory)
    except OSError:
        return []
    found = [ticket for name in names if directory and is_safe(name) and (ticket := _read(directory / name))]
    return sorted(found, key=lambda ticket: (ticket.changed, ticket.asked.job))


def ahead(job: str, gpus: Sequence[str], among: Sequence[Ticket]) -> list[Ticket]:
    """Who waits before the job, for a GPU of ``gpus``. All that wait, for a job that has no place."""
    found = []
    for ticket in among:
        if ticket.asked.job == job:
            break
        if not ticket.granted and set(ticket.asked.gpus) & set(gpus):
            found.append(ticket)
    return found


def with_jobs(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs, each with the job that has it."""
    taken = {gpu: ticket.whose for ticket in counting() for gpu in ticket.granted}
    return tuple(replace(gpu, job=taken.get(gpu.uuid, "")) for gpu in gpus)


class Kept:
    """The GPUs that this process keeps for jobs, as a host's agent does for drivers of other machines."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        """Locked files, by job."""

    def claim(self, job: str, gpus: Sequence[str], origin: str, present: Sequence[Gpu]) -> str:
        """Take the GPUs for the job, all at once. Empty if it has them now, else why not, in words.

        Where the directory cannot be used, every job has what it asks for.
        """
        asked = Asked(job, len(gpus), tuple(gpus), origin=origin)
        if not any(one.asked.job == job and one.granted == asked.gpus for one in counting()):
            self.leave(job)
            if not enter(asked):
                return ""
        self.hold(job)
        others = counting()
        taken = {gpu: one.whose for one in ahead(job, gpus, others) for gpu in one.asked.gpus}
        taken |= {gpu: one.whose for one in others if one.asked.job != job for gpu in one.granted}
        if not taken.keys() & set(gpus):
            grant(job, gpus)
            return ""
        self.leave(job)
        names = {gpu.uuid: f"GPU {gpu.index}" for gpu in present}
        words = [f"{names.get(gpu, gpu)} has job {taken[gpu]}" for gpu in gpus if gpu in taken]
        return f"{'; '.join(words)}. Ask for fewer --gpus, name other --hosts, or run the cell again later"

    def hold(self, job: str) -> None:
        """Keep what the job has been given, by this process or an earlier one."""
        if job not in self._files and (fd := hold(job)) is not None:
            self._files[job] = fd

    def leave(self, job: str) -> None:
        """Give up what the job has."""
        leave(job)
        if job in self._files:
            os.close(self._files.pop(job))

    def only(self, wanted: Callable[[str], bool]) -> None:
        """Give up what jobs have that are not wanted any more."""
        for job in [job for job in self._files if not wanted(job)]:
            self.leave(job)


def _write(fd: int, line: Record) -> None:
    """At once, because others may read the file meanwhile."""
    try:
        os.write(fd, codec.dumps(line.to_json()).encode() + b"\n")
    finally:
        os.close(fd)


def _path(job: str) -> Path:
    return queue_dir() / job


def _directory() -> Path | None:
    """The directory. None if it is missing, or if other users could change this user's files in it."""
    directory = queue_dir()
    try:
        found = directory.lstat()
    except OSError:
        return None
    private = found.st_uid == os.getuid() and not found.st_mode & 0o022
    sticky = bool(found.st_mode & stat.S_ISVTX)
    return directory if stat.S_ISDIR(found.st_mode) and (private or sticky) else None


def _read(path: Path) -> Ticket | None:
    """None for what is no file of a job, and for a file that nobody holds."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST or not _counts(fd, found):
            return None
        lines = os.read(fd, LARGEST).split(b"\n")[:-1]
        asked = Asked.from_json(codec.loads(lines[0]))
        granted = Granted.from_json(codec.loads(lines[1])).granted if len(lines) > 1 else ()
    except (OSError, ValueError, IndexError):
        return None
    finally:
        os.close(fd)
    return Ticket(asked, granted, found.st_uid, found.st_ctime_ns) if asked.job == path.name else None


def _counts(fd: int, found: os.stat_result) -> bool:
    """Whether somebody holds the file, or may not have come to it."""
    if time.time() - found.st_ctime < YOUNG:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def _clean(directory: Path) -> None:
    """Remove this user's files that nobody holds. A young file may be empty because it is being written."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            found = entry.stat(follow_symlinks=False)
            mine = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
            if mine and time.time() - found.st_ctime >= YOUNG and _read(Path(entry.path)) is None:
                os.unlink(entry.path)
