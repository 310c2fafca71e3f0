"""The journal of a job: one line per change of state. Only the job's driver writes; all others read by offset."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType

from ..protocol.disk import open_plain, reserve
from ..protocol.errors import JobNotFound, StoreError
from ..protocol.eventreader import PORTION
from ..protocol.events import Event, parse_lines
from ..protocol.paths import JobPaths
from ..protocol.state import JobState, fold
from ..protocol.typed import Malformed
from .files import lock, publish_json, read_json, write_all, writing
from .jobdir import read_plan, read_spec

ROOM = 256 * 1024
"""Bytes reserved on the disk for the journal, so that it can be completed when the disk is full."""


class JournalInUse(StoreError):
    """Another process writes this journal."""


class Writer:
    """Appends events, numbered after the journal's last one. A partial line of a dead writer is cut off."""

    def __init__(self, paths: JobPaths, known: Callable[[Event], None] | None = None) -> None:
        """``known`` is called with each event that the journal has already."""
        self._paths = paths
        with writing(paths.root):
            self._fd = os.open(
                paths.journal, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
        if not lock(self._fd):
            os.close(self._fd)
            raise JournalInUse(f"another driver writes {paths.journal}", "wait for it: the job has a driver")
        self.seq = 0
        for events, self._end in portions(paths):
            for event in events:
                self.seq = max(self.seq, event.seq)
                if known:
                    known(event)
        os.ftruncate(self._fd, self._end)
        reserve(self._fd, ROOM)

    def append(self, *events: Event) -> Event:
        """Write the events; return the last one with its number. Raises ``StoreError``, and then writes none."""
        numbered = [replace(event, seq=self.seq + place) for place, event in enumerate(events, 1)]
        lines = b"".join(event.to_line() for event in numbered)
        with writing(self._paths.root, len(lines)):
            try:
                write_all(self._fd, memoryview(lines))
            except OSError:
                os.ftruncate(self._fd, self._end)
                raise
        self._end += len(lines)
        self.seq = numbered[-1].seq
        return numbered[-1]

    def close(self) -> None:
        """Flush to the disk and close; calling it again does nothing."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            os.ftruncate(fd, self._end)  # frees the reserved space
            os.fsync(fd)
        except OSError:
            pass  # A network file system may refuse this; the lines are written anyway.
        finally:
            os.close(fd)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read(paths: JobPaths, offset: int = 0) -> tuple[list[Event], int]:
    """All events from ``offset`` (bytes) on, and the offset after the last complete line. As ``portions``."""
    events, end = [], offset
    for found, after in portions(paths, offset):
        events += found
        end = after
    return events, end


def portions(paths: JobPaths, offset: int = 0) -> Iterator[tuple[list[Event], int]]:
    """Events from ``offset`` (bytes) on, about a megabyte at a time, each with the offset after its last complete line.

    Damaged lines are skipped. A journal that is missing, or shorter than ``offset``, gives one portion without events.
    Raises ``StoreError`` if it cannot be read.
    """
    try:
        size = os.stat(paths.journal).st_size
        if size <= offset:  # cheap, since a waiting cell polls fifty times a second
            yield [], size
            return
        with open_plain(paths.journal) as file:
            file.seek(offset)
            rest = b""
            while data := file.read(PORTION):
                rest += data
                parsed = parse_lines(rest)
                rest = rest[parsed.taken :]
                offset += parsed.taken
                yield parsed.events, offset
    except FileNotFoundError:
        yield [], 0
    except OSError as error:
        raise StoreError(f"{paths.journal} cannot be read: {error.strerror}", "check the disk") from error


def state(paths: JobPaths) -> JobState:
    """The job's state: from its summary, else from its journal, folded over the state before the first event.

    Damaged files are used as far as possible. Raises ``JobNotFound``.
    """
    if not paths.root.is_dir():
        raise JobNotFound(f"there is no job {paths.job}", "`%dist` lists the jobs")
    return _summary(paths) or advanced(paths, asked_for(paths), 0)[0]


def advanced(paths: JobPaths, state: JobState, offset: int) -> tuple[JobState, int]:
    """``state`` after the events from ``offset`` on, and the offset after them: not greater where there are none."""
    end = offset
    for events, after in portions(paths, offset):
        state, end = fold(events, state), after
    return state, end


def asked_for(paths: JobPaths) -> JobState:
    """The state before the first event, from the specification and plan."""
    try:
        spec, plan = read_spec(paths), read_plan(paths)
    except StoreError:
        return JobState(job=paths.job)
    return JobState(paths.job, spec.options.name, spec.label, world_size=plan.world_size, submitted=spec.created)


def _summary(paths: JobPaths) -> JobState | None:
    if not paths.summary.exists():
        return None
    try:
        state = JobState.from_json(read_json(paths.summary))
    except (StoreError, Malformed):
        return None
    return state if state.final else None


def publish_summary(paths: JobPaths, state: JobState) -> None:
    """Write the final state of the job. Raises ``StoreError``."""
    publish_json(paths.summary, state.to_json())
