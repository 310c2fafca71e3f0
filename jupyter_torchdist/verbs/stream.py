"""The ranks' output as labelled lines, each exactly once, for whoever prints them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import TextIO

from ..protocol.paths import JobPaths
from ..protocol.state import JobState
from ..store.logs import LINE_LIMIT, Follower, LogFile, labelled
from ..views import job_text
from . import ansi

CHUNK = 1024 * 1024
"""Bytes of one file that one poll takes, so that no rank's flood keeps an interrupt or another rank waiting."""


class Lines:
    """Whole lines of all ranks since the last poll. A line is held back until its end is written."""

    def __init__(self, paths: JobPaths, keep: int | None = None) -> None:
        """``keep`` (bytes of each file): begin at the end of what is there but for so much; None: at the beginning."""
        self._follower = Follower(paths)
        self._rest: dict[LogFile, str] = {}
        if keep is not None:
            self._follower.skip(keep)
        self._torn = {path for path, offset in self._follower.offsets.items() if offset}
        """Files that are followed from the middle of a line on: what is left of that line is passed over."""

    def poll(self) -> Iterator[tuple[LogFile, str]]:
        """(file, text that ends with a newline)."""
        for file, text in self._follower.poll(CHUNK):
            whole, self._rest[file] = _split(self._rest.get(file, "") + self._from_its_begin(file, text))
            if whole:
                yield file, whole

    def drain(self) -> Iterator[tuple[LogFile, str]]:
        """All that is left, once nobody writes any more; an unfinished line gets its end."""
        growing = True
        while growing:
            growing = False
            for file, text in self._follower.poll(CHUNK, ended=True):
                growing = True
                whole, self._rest[file] = _split(self._rest.get(file, "") + self._from_its_begin(file, text))
                if whole:
                    yield file, whole
        for file, rest in self._rest.items():
            if rest:
                yield file, rest + "\n"
        self._rest.clear()

    def _from_its_begin(self, file: LogFile, text: str) -> str:
        if file.path not in self._torn:
            return text
        _, newline, text = text.partition("\n")
        if newline:
            self._torn.discard(file.path)
        return text


def _split(text: str) -> tuple[str, str]:
    """Whole lines and the rest; of a rest without end only what a terminal would still show is held."""
    end = text.rfind("\n") + 1
    rest = text[end:]
    if len(rest) <= LINE_LIMIT:
        return text[:end], rest
    shown = rest[rest.rfind("\r") + 1 :]
    return (text[:end], shown) if len(shown) <= LINE_LIMIT else (text + "\n", "")


class Console:
    """Prints a job as it goes: what the ranks write, and at the end how it ended."""

    def __init__(
        self,
        paths: JobPaths,
        out: TextIO | None = None,
        err: TextIO | None = None,
        *,
        keep: int | None = None,
        limit: int | None = None,
        only: Collection[int] | None = None,
    ) -> None:
        """``only``: ranks whose output is printed.

        ``limit`` (characters): where to stop printing, for a notebook that stores what it is shown.
        """
        self._lines = Lines(paths, keep)
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self._left, self._only = limit, only
        self._job = paths.job
        self._notes = 0

    def tick(self, state: JobState) -> None:
        """Print what is new."""
        for note in state.notes[self._notes :]:
            self._err.write(ansi.safe(f"note: {note}\n"))
        self._notes = len(state.notes)
        for file, text in self._lines.poll():
            self._print(file, text)

    def finish(self, state: JobState, now: float) -> None:
        """Print what is left, and the job's last line."""
        for file, text in self._lines.drain():
            self._print(file, text)
        if state.state != "succeeded":
            self._err.write(f"{job_text.title(state)}: {job_text.headline(state, now)}\n")
            self._err.flush()

    def _print(self, file: LogFile, text: str) -> None:
        if self._only is not None and file.rank not in self._only:
            return
        if self._left is not None:
            if self._left <= 0:
                return
            self._left -= len(text)
        stream = self._out if file.stream == "out" else self._err
        stream.write(labelled(file.rank, ansi.safe(text)))
        if self._left is not None and self._left <= 0:
            stream.write(f"… more is not shown here: %dist logs {self._job} --rank N\n")
        stream.flush()
