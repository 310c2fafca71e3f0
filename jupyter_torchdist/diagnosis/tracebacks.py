"""Python's tracebacks in logs, also where the lines of several ranks alternate."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .prefixes import Line
from .reading import Log

START = "Traceback (most recent call last)"
_FRAME = re.compile(r'\s*(?:File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?'
                    r"|(?P<cell>Cell In\[\d+\]), line (?P<number>\d+))")  # fmt: skip
_EXCEPTION = re.compile(r"(?P<type>[A-Za-z_][\w.]*?(?:\.[A-Z]\w*|^[A-Z]\w*)?)(?:: (?P<message>.*)|:?\s*)$")
_PROCESS = re.compile(r"-- Process (\d+) terminated with the following error")
_LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python3|<frozen |/bin/torchrun|importlib|/jupyter_torchdist/")

KEPT = 200
"""Tracebacks of one log that are read, half from each end."""

LONGEST = 200
"""Lines that one traceback may span, other ranks' lines among them."""


@dataclass(frozen=True)
class Place:
    """Where the user's code was."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"


@dataclass(frozen=True)
class Traceback:
    """``end`` is the line of the exception, ``user`` the innermost frame of the program.

    ``functions`` are those of all frames, ``masked`` the places of its lines that hold no sign. Python ``ignored`` what
    a destructor raised. ``rank`` is known where torch.multiprocessing says which process it was.
    """

    start: int
    end: Line
    type: str
    message: str
    user: Place | None
    functions: tuple[str, ...]
    masked: frozenset[int]
    ignored: bool = False
    rank: int | None = None

    @property
    def name(self) -> str:
        """The exception's class without its module."""
        return self.type.rpartition(".")[2]

    def __str__(self) -> str:
        message = self.message if len(self.message) <= 200 else self.message[:200] + "…"
        return f"{self.name}: {message}" if message else self.name


def find(log: Log) -> list[Traceback]:
    """All, in order. One that the log cuts off is left out."""
    found = []
    for start in log.having(START, KEPT):
        one = _read(log, start)
        if one is not None:
            found.append(one)
    return found


def is_library(file: str) -> bool:
    """Whether a frame of this file is not the program's own."""
    return bool(_LIBRARY.search(file))


def _read(log: Log, start: int) -> Traceback | None:
    head = log.line(start)
    indent = len(head.text) - len(head.text.lstrip())
    frames: list[Place] = []
    masked = {start}
    ignored = start > 0 and "Exception ignored" in log.lines[start - 1]
    for place in range(start + 1, min(start + LONGEST, len(log.lines))):
        line = log.line(place)
        if line.stream != head.stream:
            continue
        if START in line.text:
            return None  # it goes on in another: a line was lost
        text = line.text[indent:] if not line.text[:indent].strip() else line.text
        frame = _FRAME.match(text)
        if frame:
            frames.append(_place(frame))
        elif text and not text[0].isspace():
            exception = _EXCEPTION.match(text)
            if exception is None or not _is_class(exception["type"]):
                if frames and not text.startswith(("|", "+")):
                    return None
                masked.add(place)
                continue
            return Traceback(
                start,
                line,
                exception["type"],
                (exception["message"] or "").strip(),
                next((frame for frame in reversed(frames) if not is_library(frame.file)), None),
                tuple(frame.function for frame in frames),
                frozenset({*masked, place} if ignored else masked),
                ignored,
                _of_process(log, start),
            )
        masked.add(place)
    return None


def _place(frame: re.Match[str]) -> Place:
    return Place(frame["file"] or frame["cell"], int(frame["line"] or frame["number"]), frame["function"] or "")


def _is_class(name: str) -> bool:
    """As classes of exceptions are called: ``ValueError``, ``torch.cuda.OutOfMemoryError``, ``KeyboardInterrupt``."""
    last = name.rpartition(".")[2]
    return last[:1].isupper() or last.endswith(("error", "exception", "timeout"))


def _of_process(log: Log, start: int) -> int | None:
    """As torch.multiprocessing.spawn heads a traceback."""
    above = (_PROCESS.search(log.lines[place]) for place in range(max(start - 2, 0), start))
    return next((int(found[1]) for found in above if found), None)
