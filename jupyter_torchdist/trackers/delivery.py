"""Delivers a job to one tracker: what its files have, from where the last delivery ended, until the job has ended.

A destination that is down or slow delays only this process. Nothing is held in memory: the job's files are the buffer.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..protocol.errors import StoreError, TorchDistError
from ..protocol.paths import JobPaths
from ..protocol.process import ProcessId
from ..protocol.state import JobState
from ..store import journal, liveness, logs, tracking
from ..store.jobdir import read_plan, read_spec
from ..views import wording
from .base import FAILED, FINISHED, KILLED, Point, Refused, Tracker
from .facts import run_of
from .reading import Reading

LOOK_SECONDS = 1.0
"""Seconds between two looks at the files of a running job."""

POINTS = 1000
"""The largest number of points that a tracker is given at once."""

LONGEST_PAUSE = 15.0
"""Seconds between two tries, at most."""

_ENDS = {"succeeded": FINISHED, "cancelled": KILLED}


class Delivery:
    """``patience``: how many seconds it goes on trying after the job's end, or without a driver of the job."""

    def __init__(self, paths: JobPaths, name: str, tracker: Tracker, patience: float) -> None:
        """Raises ``JobNotFound``, ``DamagedJob``."""
        self._paths, self._tracker, self._patience = paths, tracker, patience
        self._run = run_of(paths)
        self._reading = Reading(paths, read_plan(paths), read_spec(paths).created)
        self._job: JobState = journal.asked_for(paths)
        self._offset = 0
        self._hosts: tuple[str, ...] = ()
        self._opened = False
        self._lock = threading.Lock()
        """Held while the file is written: time may be up in another thread."""
        self._left = False
        self._alone: float | None = None
        """Since when (on the monotonic clock) no driver writes the job's files any more."""
        self._later = f"torchdist track {paths.job} {name}"
        known = tracking.of(paths, name)
        self._known = replace(known, process=ProcessId.mine(), later=known.later or self._later, closed=False)

    def go_on(self) -> None:
        """Deliver until everything is delivered. Errors of the tracker are said, and tried again."""
        pause = 0.5
        self._publish()
        while not self._known.closed:
            try:
                self._step()
                pause = 0.5
                if self._known.trouble:
                    self._publish(trouble="", since=0.0)
                if not self._known.closed:
                    time.sleep(LOOK_SECONDS)
            except Exception as error:  # noqa: BLE001  # a tracker's client may raise anything
                if not self._paths.root.is_dir():
                    return
                self._publish(trouble=_in_words(error), since=self._known.since or time.time())
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def time_is_up(self, now: float) -> bool:
        """Whether it has gone on long enough, on the monotonic clock. Called from another thread."""
        return not self._paths.root.is_dir() or (self._alone is not None and now - self._alone > self._patience)

    def leave(self) -> None:
        """Say what is not delivered, and write no more."""
        with self._lock:
            self._left = True
            why = self._known.trouble or f"it took longer than {wording.duration(self._patience)}"
            self._write(replace(self._known, trouble=why))

    def _publish(self, **changes: Any) -> None:
        with self._lock:
            self._known = replace(self._known, **changes)
            if not self._left:
                self._write(self._known)

    def _write(self, known: tracking.Tracking) -> None:
        """On a full disk the delivery goes on; another one would begin again where the file is."""
        if self._paths.root.is_dir():
            with contextlib.suppress(StoreError):
                tracking.publish(self._paths, known)

    def _step(self) -> None:
        self._look()
        over = self._job.final  # known before the last points are read: none comes after
        if not self._opened:
            self._open()
        for portion in self._reading.portions(self._known.at, self._known.counts):
            batches = range(0, len(portion.points), POINTS)
            refused = sum(self._log(portion.points[first : first + POINTS]) for first in batches)
            at = {**self._known.at, portion.file: portion.end}
            sent = self._known.sent + len(portion.points) - refused
            self._publish(at=at, counts=portion.counts, sent=sent, refused=self._known.refused + refused)
        hosts = tuple(sorted({rank.host for rank in self._job.ranks.values() if rank.host}))
        if hosts != self._hosts:
            self._tracker.tag({"torchdist.hosts": ", ".join(hosts)})
            self._hosts = hosts
        if over:
            self._finish()

    def _log(self, points: Sequence[Point]) -> int:
        """Deliver points. Returns how many are refused: of a refused batch, the others are delivered in its halves."""
        try:
            self._tracker.log(points)
        except Refused:
            half = len(points) // 2
            return self._log(points[:half]) + self._log(points[half:]) if half else 1
        return 0

    def _look(self) -> None:
        """Read what has happened to the job."""
        self._job, self._offset = journal.advanced(self._paths, self._job, self._offset)
        alone = liveness.effective_state(self._paths, self._job) in ("orphaned", "unreachable") or self._job.final
        self._alone = (self._alone or time.monotonic()) if alone else None

    def _open(self) -> None:
        opened = self._tracker.open(self._run, self._known.place)
        begun = {"at": {}, "counts": {}, "sent": 0, "refused": 0, "files": ()} if opened.fresh else {}
        self._publish(link=opened.link, place=opened.place, later=opened.later or self._later, **begun)
        self._opened = True
        for path, name in self._of_the_submission():
            self._file(path, name)

    def _finish(self) -> None:
        state = self._job
        for path, name in self._of_the_end():
            self._file(path, name)
        self._tracker.tag({"torchdist.state": state.state, "torchdist.reason": state.reason[:500]})
        self._tracker.close(_ENDS.get(state.state, FAILED), state.ended)
        self._publish(closed=True)

    def _file(self, path: Path, name: str) -> None:
        if name not in self._known.files and path.is_file() and path.stat().st_size:
            self._tracker.file(path, name)
            self._publish(files=(*self._known.files, name))

    def _of_the_submission(self) -> Iterator[tuple[Path, str]]:
        for path in (self._paths.spec, self._paths.plan, self._paths.manifest):
            yield path, f"job/{path.name}"

    def _of_the_end(self) -> Iterator[tuple[Path, str]]:
        yield self._paths.journal, "job/journal.jsonl"
        for file in logs.files(self._paths):
            yield file.path, f"logs/rank_{file.rank}.{file.stream}.txt"
        for path in sorted(self._paths.root.glob("profile-*.json.gz")):
            yield path, f"job/{path.name}"
        for path in sorted(self._paths.nodes.glob("*/launcher.log")):
            yield path, f"logs/{path.parent.name}.launcher.txt"


def _in_words(error: Exception) -> str:
    """What a person needs of it: clients word a server that is down in many ways, around the same error of a socket."""
    chain: list[BaseException] = [error]
    while following := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(following)
    if cut := next((one for one in chain if _is_of_the_network(one)), None):
        return f"its server does not answer ({getattr(cut, 'strerror', None) or cut})"
    text = error.message if isinstance(error, TorchDistError) else str(error)
    return wording.first_line(f"{type(error).__name__}: {text}" if text else repr(error), 300)


def _is_of_the_network(error: BaseException) -> bool:
    if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)):
        return True
    return isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)
