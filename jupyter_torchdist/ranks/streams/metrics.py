"""Curves and progress of one rank: collected in memory, written as JSON lines by the flusher.

A line is ``{"t", "k": "log", "step", "v": {name: value}}`` (with ``"auto": true`` for scalars of autolog, and without
values for a loss that the user's code logs),
``{"t", "k": "progress", "id", "desc", "n", "total"}``, or ``{"t", "k": "samples", "n"}``: how many samples were trained
with so far, or ``{"t", "k": "steps", "n"}``: how many steps of the training are over, with those of the checkpoint that
was resumed. Times are in seconds since the epoch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import count
from math import isfinite, nan
from pathlib import Path
from typing import Any, TypeVar

from ...protocol import codec
from .flusher import Flusher
from .scalars import Lost, NotAScalar, Unread, read

T = TypeVar("T")

LONGEST = 200
"""Characters of a name. A longer one is cut in the middle, as no view shows it."""

PERIOD = 0.05
"""Seconds between two writes of the file."""

_PROGRESS_PERIOD = 0.1
_NUMBERS = (float, int)

Log = tuple[float, "int | None", bool, bool, dict[str, Any]]


class Recorder:
    """The target of ``td.log``, ``td.progress`` and autolog; a ``Source`` of the flusher.

    Without a file (one plain process, without the magic) values are checked and then dropped.
    """

    def __init__(
        self,
        path: Path | None = None,
        flusher: Flusher | None = None,
        not_a_number: Callable[[str, int | None], None] | None = None,
    ) -> None:
        """``not_a_number(name, step)`` is called for each NaN that autolog recorded."""
        self.deadline: float | None = None
        self._pending: list[Log] = []
        self._fd = -1 if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._flusher, self._not_a_number = flusher, not_a_number
        self._refused: set[str] = set()
        self._bars = count()
        self.told: Callable[[str, object], None] | None = None
        """Called after each record with what made it, and which of its kind; None while nobody profiles."""
        self._samples = 0
        """Samples trained with so far."""
        self.steps: Callable[[], int] = int
        """How many steps of the training are over; called in any thread. 0 where nobody counts them."""
        self._written = {"samples": 0, "steps": 0}
        """What the file tells of both."""
        if flusher is not None:
            flusher.add(self)
            os.register_at_fork(after_in_child=self._after_fork)

    def log(self, values: dict[str, Any], step: Any = None, *, auto: bool = False, drawn: bool = True) -> None:
        """Record scalars. Does not raise for a value that is not a number: leaves it out, with one warning per name.

        ``drawn``: whether the values are a curve; else the step counts, and a NaN.
        """
        if step is not None and type(step) is not int:
            step = self._whole(step)
        for value in values.values():
            if type(value) not in _NUMBERS:
                values = dict(self._readable(values))
                break
        if self._fd < 0 or not values:
            return
        self._pending.append((time.time(), step, auto, drawn, values))
        if self.deadline is None:
            self._arm()
        if self.told is not None:
            self.told("backward()" if auto else "td.log()", tuple(values))

    def trained(self, samples: int) -> None:
        """Count samples. The number is written with the scalars that are recorded next."""
        self._samples += samples

    def _arm(self) -> None:
        self.deadline = time.monotonic() + PERIOD
        if self._flusher is None:
            self.flush()
        else:
            self._flusher.wake()

    def _whole(self, step: Any) -> int | None:
        try:
            return int(step)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            self._refuse("step", f"a {type(step).__name__}")
            return None

    def _refuse(self, name: str, what: str) -> None:
        if name not in self._refused:
            self._refused.add(name)
            print(f"td.log: {name} is {what}, not a number; it is left out (said once)", file=sys.stderr)

    def _readable(self, values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            try:
                yield name, read(value)
            except NotAScalar as refusal:
                self._refuse(name, str(refusal))

    def flush(self) -> None:
        """Write all values known by now. A device value that has not arrived holds back later values."""
        batch = self._pending[:]
        lines = []
        done = 0
        for t, step, auto, drawn, values in batch:
            try:
                line = _log_line(t, step, auto, values)
            except Unread:
                break
            except Lost:
                done += 1
                continue
            if auto and _NAN in line and self._not_a_number is not None:
                self._not_a_number(next(iter(values)), step)
            lines.append(line if drawn else _log_line(t, step, auto, {}))
            done += 1
        del self._pending[:done]
        for kind, number in (("samples", self._samples), ("steps", self.steps())):
            if number != self._written[kind]:
                self._written[kind] = number
                lines.append(codec.dumps({"t": time.time(), "k": kind, "n": number}) + "\n")
        self.deadline = time.monotonic() + PERIOD if self._pending else None
        self._write("".join(lines))

    def close(self, patience: float = 2.0) -> None:
        """Write everything, waiting at most ``patience`` seconds for device values."""
        end = time.monotonic() + patience
        self.flush()
        while self._pending and time.monotonic() < end:
            time.sleep(0.001)
            self.flush()

    def progress(self, iterable: Iterable[T], total: int | None = None, desc: str = "") -> Iterator[T]:
        """Yield the items. Writes the number of items so far, of ``total`` (default ``len``), ten times a second."""
        if total is None:
            try:
                total = len(iterable)  # type: ignore[arg-type]
            except TypeError:
                total = None
        note = self._bar(number := next(self._bars), desc, total)
        done, due = 0, time.monotonic() + _PROGRESS_PERIOD
        note(0)
        try:
            for item in iterable:
                yield item
                done += 1
                if self.told is not None:
                    self.told("td.progress()", number)
                if (now := time.monotonic()) >= due:
                    due = now + _PROGRESS_PERIOD
                    note(done)
        finally:
            note(done)

    def _bar(self, number: int, desc: str, total: int | None) -> Callable[[int], None]:
        def note(done: int) -> None:
            bar = {"t": time.time(), "k": "progress", "id": number, "desc": str(desc), "n": done, "total": total}
            self._write(codec.dumps(bar) + "\n")

        return note

    def _write(self, lines: str) -> None:
        if not lines or self._fd < 0:
            return
        try:
            os.write(self._fd, lines.encode("ascii"))
        except OSError:
            return  # on a full disk points are lost; the training goes on

    def _after_fork(self) -> None:
        """A forked child (a DataLoader worker) has no flusher, so it writes each line at once."""
        self._flusher = None
        self._pending.clear()
        self.deadline = None


def _log_line(t: float, step: int | None, auto: bool, values: dict[str, Any]) -> str:
    """One line as ``codec.dumps`` would write it, but ten times faster, because this runs in the training process."""
    parts = ",".join(
        [f"{_coded(name if len(name) <= LONGEST else _cut(name))}:{_number(value)}" for name, value in values.items()]
    )
    return f'{{"t":{t!r},"k":"log","step":{_step(step)},"v":{{{parts}}}{_AUTO if auto else ""}}}\n'


def _number(value: Any) -> str:
    number = value() if callable(value) else value
    return repr(number) if type(number) is float and isfinite(number) else codec.dumps(number)


def _step(step: Any) -> str:
    return str(step) if type(step) is int and -codec.SAFE_INTEGER <= step <= codec.SAFE_INTEGER else codec.dumps(step)


_AUTO = ',"auto":true'
_NAN = f":{codec.dumps(nan)}"


@lru_cache(maxsize=4096)
def _coded(name: str) -> str:
    """A name as JSON. Half a surrogate pair, which no file or browser takes, is spelled out."""
    return json.dumps(name if name.isascii() else name.encode("utf-8", "backslashreplace").decode("utf-8"))


def _cut(name: str) -> str:
    return f"{name[: LONGEST // 2]}…{name[1 - LONGEST // 2 :]}"
