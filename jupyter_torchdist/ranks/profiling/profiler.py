"""Profiles some steps of this rank: on request, while its code runs, or from its beginning with ``--profile``.

The request is a line of a file that the agent appends to. The profiler starts at the end of a step, in the thread that
trains, because torch profiles the thread that starts it. The first step after that is left out: it pays for the start.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...protocol import codec
from ...protocol.disk import open_plain, size_of
from ...protocol.events import Profiled, ProfileRequest
from ...protocol.paths import NodePaths, is_safe
from ...torch_private import profiler as kineto
from ..streams.metrics import Recorder
from . import shares, timeline
from .steps import UNITS, Steps

BUSY = "another profile of this job is not finished yet"
OWN = "its code runs a profiler of its own, and torch cannot run two"
NONE = "this build of torch has no profiler (Kineto), which released builds have"
ENDED = "its code has ended"

FROM_THE_START, FOREVER = "start", 1e9
"""The id of the profile of ``--profile``, and the seconds that it may take."""


@dataclass
class _Run:
    asked: ProfileRequest
    until: float
    """When the profile ends, complete or not, on the monotonic clock."""
    thread: int = 0
    """The number of the thread that started the profiler; 0: nobody has yet."""
    native: int = 0
    """The same as the system counts it."""
    profiler: Any = None
    yields: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    unit: tuple[int, object] | None = None
    """What ends a step."""
    marks: list[int] = field(default_factory=list)
    """When steps ended, in nanoseconds since the epoch. The first is the profiler's start."""


class Profiling:
    """Of this process. Each request is answered with one event ``rank.profiled``."""

    def __init__(self, files: NodePaths, rank: int, say: Callable[..., None], recorder: Recorder) -> None:
        """``say`` writes an event of the rank."""
        self._files, self._rank, self._say = files, rank, say
        self.requests = files.profile_requests
        self._steps = Steps(recorder, self._ended)
        self._lock = threading.Lock()
        self._run: _Run | None = None
        self._pid = os.getpid()
        self._read = size_of(self.requests)
        self._over = False

    def heard(self) -> None:
        """Read what the agent has appended. Never raises: user code can write into the file."""
        with contextlib.suppress(OSError, ValueError), open_plain(self.requests) as file:
            file.seek(self._read)
            data = file.read()
            end = data.rfind(b"\n") + 1
            self._read += end
            for line in data[:end].splitlines():
                self.ask(ProfileRequest.from_json(codec.loads(line)))

    def ask(self, asked: ProfileRequest) -> None:
        """Profile from the end of the next step on. Refuses if that is not possible, with an event."""
        if not is_safe(asked.id) or asked.steps < 1:
            return
        with self._lock:
            problem = ENDED if self._over else NONE if not kineto.available() else BUSY if self._run else ""
            if not problem:
                self._run = run = _Run(asked, time.monotonic() + asked.within)
                self._steps.follow()
        if problem:
            self._tell(asked, problem=problem)
        elif asked.within < FOREVER:
            timer = threading.Timer(asked.within, self._expired, [run])
            timer.daemon = True
            timer.start()

    def _expired(self, run: _Run) -> None:
        """The time is over. A profiler that runs is stopped at the end of a step, by the thread that started it."""
        with self._lock:
            if self._run is not run or run.thread:
                return
            self._drop(run)
        self._tell(run.asked, problem=f"no step ended within {run.asked.within:g} s")

    def _ended(self, unit: int, which: object) -> None:
        """A step may have ended. This runs between two lines of user code."""
        run = self._run
        if run is None or os.getpid() != self._pid or run.thread not in (0, threading.get_ident()):
            return
        late = time.monotonic() > run.until
        if not run.thread:
            self._begin(run, unit, which)
        elif run.unit is not None and unit < run.unit[0]:
            run.unit, run.marks = (unit, which), [time.time_ns()]
        elif (unit, which) == run.unit:
            last = len(run.marks) > run.asked.steps or late
            if last or len(run.marks) == 1:
                _settle()
            run.marks.append(time.time_ns())
            if last:
                self._finish(run)
        elif late:
            self._finish(run)

    def _begin(self, run: _Run, unit: int, which: object) -> None:
        with self._lock:
            if self._run is not run:
                return
            run.thread, run.native = threading.get_ident(), threading.get_native_id()
        problem = OWN if kineto.runs() else ""
        try:
            if not problem:
                run.profiler = kineto.started()
                run.yields.enter_context(kineto.before_another(self._give_way))
        except Exception as error:  # noqa: BLE001  # what the profiler of this build or machine lacks
            problem = f"the profiler does not start: {error}"
        if problem:
            self._drop(run)
            self._tell(run.asked, problem=problem)
            return
        run.unit, run.marks = (unit, which), [time.time_ns()]

    def _give_way(self) -> None:
        """The user's code starts a profiler: ours ends, with what it has."""
        if (run := self._run) is not None and run.thread == threading.get_ident():
            self._finish(run, "its code started a profiler of its own")

    @contextlib.contextmanager
    def during(self, steps: int) -> Iterator[None]:
        """User code runs. ``steps`` are profiled from its beginning (``--profile``)."""
        if steps:
            self.ask(ProfileRequest(FROM_THE_START, steps, FOREVER))
        failed = True
        try:
            yield
            failed = False
        finally:
            with self._lock:
                self._over = True
            if (run := self._run) is not None:
                self._end(run, failed)

    def _end(self, run: _Run, failed: bool) -> None:
        """No step follows. After a failure the GPU may never answer: the profiler is left as it is."""
        if run.profiler is not None and not failed and run.thread == threading.get_ident():
            self._finish(run, ENDED)
            return
        self._drop(run)
        count = len(run.marks) - 1
        seen = f"after {count} step{'s' * (count > 1)}" if count > 0 else "before its first step had ended"
        self._tell(run.asked, problem=f"its code {'failed' if failed else 'ended'} {seen}")

    def _drop(self, run: _Run) -> None:
        self._steps.leave()
        run.yields.close()
        self._run = None

    def _finish(self, run: _Run, why: str = "") -> None:
        """Stop the profiler and publish what it saw. Never raises. ``why``: the reason for an early end."""
        self._steps.leave()
        run.yields.close()
        try:
            told = self._publish(run, why)
        except Exception as error:  # noqa: BLE001  # a full disk, a trace that cannot be read: the job goes on
            told = {"problem": f"the profile was not written: {error}"}
        self._run = None
        self._tell(run.asked, **told)

    def _publish(self, run: _Run, why: str) -> dict[str, Any]:
        origin = run.marks[0] // 1000
        ends = [(mark - 1000 * origin) / 1000 for mark in run.marks]
        marks = ends[1:] if len(ends) > 2 else ends
        steps = len(marks) - 1
        why = why or f"no more ended within {run.asked.within:g} s"
        with tempfile.TemporaryDirectory(prefix="torchdist-profile-") as folder:
            kineto.stopped(run.profiler, str(Path(folder, "trace.json")))
            if steps < 1:
                return {"problem": why}
            events = timeline.read(Path(folder, "trace.json"), origin)
        spent = shares.shares(events, (marks[0], marks[-1]), run.native)
        unit = UNITS[run.unit[0] if run.unit else 0]
        size = timeline.write(self._files.profile(self._rank, run.asked.id), events, ends, unit)
        each = {name: value / steps / 1e6 for name, value in spent.items()}
        length = (marks[-1] - marks[0]) / steps / 1e6
        told = {"steps": steps, "unit": unit, "origin": origin, "size": size, "step": length, **each}
        return told | ({"problem": why} if steps < run.asked.steps else {})

    def _tell(self, asked: ProfileRequest, **told: Any) -> None:
        self._say("rank.profiled", profile=Profiled(asked.id, asked.steps, **told).to_json())


def _settle() -> None:
    """Wait for the GPU, so that what it does belongs to the steps that asked for it."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
