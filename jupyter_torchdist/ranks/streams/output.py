"""``sys.stdout`` and ``sys.stderr`` of a rank, written to its files.

While there is no output, the stream has our own ``write``: it flushes a complete line at once and wakes the flusher.
Then, while output keeps coming, ``write`` is the C method, and the flusher empties the buffer every few milliseconds.
So a loop of prints is as fast as with a plain file. A full disk never raises in user code.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

from .flusher import Flusher

PERIOD = 0.004
"""Seconds between two flushes while output keeps coming: a SIGKILL loses at most about this time of output."""

_BUFFER = 64 * 1024
_NEVER_FULL = 1 << 24


class LossyFile(io.FileIO):
    """A descriptor whose ``write`` drops and counts lines instead of raising ``OSError``."""

    def __init__(self, fd: int, name: str) -> None:
        super().__init__(fd, "w", closefd=False)
        self.name = name
        self.wrote = False
        self.dropped = 0
        self._torn = False

    def write(self, data: Any) -> int:
        self.wrote = True
        try:
            if self._torn:
                super().write(b"\n")
                self._torn = False
            return super().write(data)
        except OSError:
            self._torn = True
            self.dropped += bytes(data).count(b"\n") or 1
            return len(data)

    @property
    def failing(self) -> bool:
        """Whether the last write was dropped."""
        return self._torn


UNINTERRUPTIBLE: CodeType = LossyFile.write.__code__
"""A ``KeyboardInterrupt`` in this code would make the buffer write its content twice, so the SIGINT handler waits."""


class Stream:
    """One text stream over descriptor ``fd``; a ``Source`` of the flusher."""

    def __init__(
        self,
        fd: int,
        name: str,
        flusher: Flusher,
        on_dropped: Callable[[int], None],
        on_written: Callable[[], None] | None = None,
    ) -> None:
        self.deadline: float | None = None
        self.raw = LossyFile(fd, name)
        self.text = _text_over(self.raw)
        self._write = self.text.write
        self._flusher = flusher
        self._on_dropped = on_dropped
        self._on_written = on_written
        self._listen()
        flusher.add(self)

    def _listen(self) -> None:
        self.text.write = self._quiet_write  # type: ignore[method-assign]

    def _release(self) -> None:
        self.text.__dict__.pop("write", None)

    def _quiet_write(self, text: str, /) -> int:
        count = self._write(text)
        if text.endswith("\n"):
            self._release()
            self.text.flush()
        # Text without a newline waits a moment: ``print`` writes the newline separately, and that flushes both.
        self.deadline = time.monotonic() + PERIOD
        self._flusher.wake()
        return count

    def flush(self) -> None:
        """Write buffered text; if there was none, use our own ``write`` again. Never raises."""
        try:
            self._settle()
        except (ValueError, RuntimeError, OSError):
            self.deadline = None  # user code closed or detached the stream
        if self.raw.dropped and not self.raw.failing:
            dropped, self.raw.dropped = self.raw.dropped, 0
            self._on_dropped(dropped)

    def _settle(self) -> None:
        self.text.flush()
        if not self.raw.wrote:
            self.deadline = None
            self._listen()
            self.text.flush()  # text from between the first flush and the new ``write``
        if self.raw.wrote:
            self.raw.wrote = False
            self._release()
            self.deadline = time.monotonic() + PERIOD
            if self._on_written is not None:
                self._on_written()

    def close(self) -> None:
        """Flush for the last time and report lost lines."""
        self.flush()
        if self.raw.dropped:
            self._on_dropped(self.raw.dropped)
            self.raw.dropped = 0

    def after_fork(self) -> None:
        """A forked child has no flusher, so each line is written when it is complete."""
        self._release()
        try:
            self.text.reconfigure(line_buffering=True)
        except ValueError:
            return


def _text_over(raw: LossyFile) -> io.TextIOWrapper:
    """A text stream over ``raw`` that is as fast as over a plain file.

    At every write, ``TextIOWrapper`` checks whether the file is closed: in C for an exact ``io.FileIO``, else by
    attributes (20 % of a print's time). So it is created over an ``io.FileIO``, and then its buffer gets ``raw``.
    """
    buffer = io.BufferedWriter(io.FileIO(raw.fileno(), "w", closefd=False), _BUFFER)
    text = io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", newline="\n")
    buffer.__init__(raw, _BUFFER)  # type: ignore[misc]
    text.mode = "w"  # type: ignore[misc]  # as the interpreter does with its own streams
    # Before CPython 3.12.4, a write that flushes a full chunk loses text that other threads write meanwhile
    # (python/cpython#119506). With this chunk size, the flusher empties the stream long before it is full.
    text._CHUNK_SIZE = _NEVER_FULL  # type: ignore[attr-defined]
    return text


class Output:
    """Redirects the standard streams of this process to the files ``out`` and ``err``."""

    def __init__(
        self,
        out: Path,
        err: Path,
        flusher: Flusher,
        on_dropped: Callable[[int], None],
        on_written: Callable[[], None] | None = None,
    ) -> None:
        """``on_written`` is called after a flush that wrote something; it must be quick and never raise."""
        for path, fd in ((Path(os.devnull), 0), (out, 1), (err, 2)):
            _open_as(path, fd)
        _line_buffer_c_stdout()
        self.out = Stream(1, "<stdout>", flusher, on_dropped, on_written)
        self.err = Stream(2, "<stderr>", flusher, on_dropped, on_written)
        sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
        sys.stdout = sys.__stdout__ = self.out.text  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = self.err.text  # type: ignore[misc]
        self._flusher = flusher
        os.register_at_fork(before=self._before_fork, after_in_parent=flusher.resume, after_in_child=self._after_fork)

    def tell(self, text: str) -> None:
        """Write to the file ``out``, also where user code has put another stream in place of ``sys.stdout``."""
        with contextlib.suppress(ValueError, OSError):  # user code closed it
            self.out.text.write(text)

    def flush(self) -> None:
        """Flush Python's streams."""
        self.out.flush()
        self.err.flush()

    def close(self) -> None:
        self.out.close()
        self.err.close()
        ctypes.CDLL(None).fflush(None)

    def _before_fork(self) -> None:
        self._flusher.pause()
        self.flush()

    def _after_fork(self) -> None:
        self._flusher.resume()
        self.out.after_fork()
        self.err.after_fork()


def _open_as(path: Path, fd: int) -> None:
    flags = os.O_RDONLY if fd == 0 else os.O_WRONLY | os.O_APPEND | os.O_CREAT
    opened = os.open(path, flags, 0o600)
    if opened != fd:
        os.dup2(opened, fd)
        os.close(opened)
    else:
        os.set_inheritable(fd, True)


def _line_buffer_c_stdout() -> None:
    """Line buffering for C and C++ libraries, which would else buffer blocks: setvbuf(3) with _IOLBF."""
    libc = ctypes.CDLL(None)
    name = "__stdoutp" if sys.platform == "darwin" else "stdout"
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, 1, 0)
