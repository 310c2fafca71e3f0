"""The ranks' output as labelled lines, each exactly once, for printing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from math import inf
from typing import TextIO

from ..protocol.paths import JobPaths
from ..protocol.state import JobState, Stall
from ..store import segments, tracking
from ..store.logs import decode
from ..store.screen import Screen
from ..store.segments import Log, Segment
from ..store.tail import Tail
from ..views import job_text, wording
from . import ansi
from .torchrun_logs import Output

CHUNK = 1024 * 1024
"""Bytes that one poll reads for each file, so that much output does not delay an interrupt."""


class Lines:
    """Complete lines of all ranks since the last poll. A line is held back until its end is written."""

    def __init__(self, paths: JobPaths, keep: int | None = None) -> None:
        """``keep``: begin at the last ``keep`` bytes of each existing file; None: begin at its start."""
        self._paths = paths
        self._tail = Tail({}, first=keep, lag=inf, patience=inf)
        self._screens: dict[str, Screen] = {}
        self._logs: dict[str, Log] = {}
        self._take(limit=0)

    def poll(self) -> Iterator[tuple[Log, str]]:
        """Pairs of a log and a text that ends with a newline, oldest first."""
        yield from self._whole(self._take(CHUNK))

    def drain(self) -> Iterator[tuple[Log, str]]:
        """The rest of the output after the ranks have ended; an unfinished line gets a newline."""
        while taken := self._take(CHUNK, ended=True):
            yield from self._whole(taken)
        for name, screen in self._screens.items():
            if rest := screen.end():
                yield self._logs[name], rest + "\n"

    def _take(self, limit: int, ended: bool = False) -> list[Segment]:
        self._logs = segments.find(self._paths) | self._logs
        sizes = {name: log.size() for name, log in self._logs.items()}
        return self._tail.poll(self._logs, sizes, time.monotonic(), limit * len(sizes), ended)

    def _whole(self, taken: list[Segment]) -> Iterator[tuple[Log, str]]:
        for segment in taken:
            screen = self._screens.setdefault(segment.log.name, Screen())
            if whole := screen.write(decode(segment.data)):
                yield segment.log, whole


class Console:
    """Prints the ranks' output while the job runs, and at the end how it ended."""

    def __init__(
        self,
        paths: JobPaths,
        out: TextIO | None = None,
        err: TextIO | None = None,
        *,
        keep: int | None = None,
        limit: int | None = None,
        output: Output | None = None,
        role: str = "",
        tap: Callable[[Log, str], None] = lambda log, text: None,
    ) -> None:
        """``output``: what is printed, and how lines are labelled, for a plan with this ``role``.

        ``tap`` gets all output.

        ``limit``: the largest number of characters to print, because a notebook stores its output.
        """
        self._lines = Lines(paths, keep)
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self._left, self._role, self._tap = limit, role, tap
        self._output = output or Output()
        self._paths = paths
        self._notes = 0
        self._stall: Stall | None = None

    def tick(self, state: JobState) -> None:
        """Print new notes and lines, and that no rank makes progress."""
        for note in state.notes[self._notes :]:
            self.say(f"note: {note}\n")
        self._notes = len(state.notes)
        for log, text in self._lines.poll():
            self._print(log, text)
        if state.stall != self._stall:
            self._stall = state.stall
            self.say("the ranks make progress again\n" if state.stall is None else _stalled(state.stall))

    def finish(self, state: JobState, now: float) -> None:
        """Print the rest of the output, where the job is tracked, and its headline unless it succeeded."""
        for log, text in self._lines.drain():
            self._print(log, text)
        for line in tracking.lines(self._paths):
            self._err.write(ansi.safe(f"{line}\n"))
        if state.state != "succeeded":
            self.say(f"{job_text.title(state)}: {job_text.headline(state, now)}\n")

    def say(self, text: str) -> None:
        """What is not the ranks' own output."""
        self._err.write(ansi.safe(text))
        self._err.flush()

    def _print(self, log: Log, text: str) -> None:
        self._tap(log, text)
        if self._output.prints(log.rank, log.stream):
            self.write(log, text)

    def write(self, log: Log, text: str) -> None:
        """Whole lines of one log."""
        if self._left is not None:
            if self._left <= 0:
                return
            self._left -= len(text)
        stream = self._out if log.stream == "out" else self._err
        stream.write(self._output.label(self._role, log.rank, ansi.safe(text)))
        if self._left is not None and self._left <= 0:
            stream.write(f"… more is not shown here: %dist logs {self._paths.job} --rank N\n")
        stream.flush()


def _stalled(stall: Stall) -> str:
    return f"{wording.stalled(stall, time.time())}\n  → {stall.finding.remedy}\n"
