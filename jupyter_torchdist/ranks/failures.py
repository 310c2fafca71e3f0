"""An exception of user code as an ``ErrorRecord``: only user frames, with line numbers as the user sees them."""

from __future__ import annotations

import itertools
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace

from ..protocol.errors import TorchDistError
from ..protocol.events import ErrorRecord
from ..usercode.frames import is_ours, is_users

_FRAMES = 40
"""Number of frames kept at each end of a deep recursion."""

_LOOP = f"{os.sep}asyncio{os.sep}"

_TEXT = 200_000
"""Largest number of characters of the traceback."""


def record(error: BaseException, raised: float | None = None) -> ErrorRecord:
    """The record of ``error``. ``raised``: seconds since the epoch, by default now."""
    t = time.time() if raised is None else raised
    described = traceback.TracebackException(type(error), error, error.__traceback__, compact=True)
    frames = tuple(
        (frame.filename, frame.lineno or 0, frame.name, frame.line or "")
        for frame in _ends(_users(described.stack))
        if frame is not None
    )
    for part in _chain(described):
        _tidy(part)
    if isinstance(error, TorchDistError) and all(is_ours(frame[0]) for frame in frames):
        frames = ()  # its message is enough; frames of this package would not help
        described.stack.clear()
        _drop_our_causes(described)
    text = "".join(described.format())
    if len(text) > _TEXT:
        text = text[: _TEXT // 2] + "\n  … (shortened) …\n" + text[-_TEXT // 2 :]
    kind = type(error)
    return ErrorRecord(kind.__qualname__, kind.__module__, _message(error), text, frames, t)


def exit_code(error: SystemExit) -> int:
    """The exit code of a program that ``sys.exit(…)`` ended."""
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def ended_well(error: BaseException) -> bool:
    """Whether ``error`` is a normal end: ``sys.exit()`` or ``sys.exit(0)``."""
    return isinstance(error, SystemExit) and exit_code(error) == 0


def end_in_words(error: BaseException) -> str:
    """What to tell of a normal end: in a notebook it is an error, at which "run all cells" stops."""
    lines = [f" at {file}, line {line}" for file, line, *_ in record(error).frames if is_users(file)]
    return f"sys.exit(){lines[-1] if lines else ''} ended the code: what follows it did not run"


def of_a_program(error: BaseException) -> tuple[ErrorRecord, int]:
    """The record of a program's exception, and the exit code. For ``sys.exit(…)`` Python prints no traceback."""
    found = record(error)
    if not isinstance(error, SystemExit):
        return found, 1
    said = "" if error.code is None or isinstance(error.code, int) else f"{_message(error)}\n"
    return replace(found, text=said, frames=()), exit_code(error)


def _drop_our_causes(described: traceback.TracebackException) -> None:
    """Drop causes raised in this package: our own message includes them."""
    for link in ("__cause__", "__context__"):
        part = getattr(described, link)
        if part is not None and all(is_ours(frame.filename) for frame in part.stack):
            setattr(described, link, None)


def _message(error: BaseException) -> str:
    try:
        return str(error)[:_TEXT]
    except Exception:  # noqa: BLE001  # the user's __str__
        return "<the exception's own text raised an error>"


def _users(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """The user's frames; if there are none (our own code failed), all frames.

    The loop that runs a cell with ``await`` is not shown.
    """
    found = [frame for frame in stack if not is_ours(frame.filename)]
    return list(itertools.dropwhile(lambda frame: _LOOP in frame.filename, found)) or found or list(stack)


def _ends(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary | None]:
    """The outer and the inner frames of a deep recursion; None stands for the frames left out."""
    if len(frames) <= 2 * _FRAMES:
        return list(frames)
    return [*frames[:_FRAMES], None, *frames[-_FRAMES:]]


def _chain(described: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """The exception, its causes and contexts, and the members of groups."""
    todo: list[traceback.TracebackException | None] = [described]
    seen: set[int] = set()
    while todo:
        part = todo.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        todo += [part.__cause__, part.__context__, *(getattr(part, "exceptions", None) or ())]


def _tidy(part: traceback.TracebackException) -> None:
    """Keep only the user's frames of one exception, and only the ends of a recursion."""
    frames = _users(part.stack)
    kept: list[traceback.FrameSummary] = []
    for frame in _ends(frames):
        if frame is None:
            left_out = len(frames) - 2 * _FRAMES
            frame = traceback.FrameSummary(f"… {left_out} more frames …", 0, "…", lookup_line=False, line="")
        kept.append(frame)
    part.stack[:] = kept
