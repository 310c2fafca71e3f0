"""What ``faulthandler`` writes of a process's threads: where it is, in the user's words."""

from __future__ import annotations

import re

from .frames import OURS

_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_LIBRARY = re.compile(r"/lib/python3[^/]*/|^<frozen ")
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/|.*/lib/python3[^/]*/")
_WRAPPERS = ("wrapper", "wrapped", "_wrapped_call_impl", "_call_impl", "inner", "_fn", "decorate_context")
_COLLECTIVES = re.compile(r"_?(all_|all$|reduce|broadcast|gather|scatter|barrier$)")
"""Functions of ``torch.distributed`` that the flight recorder names: a stack need not name them again."""

LOADER = "torch/utils/data/"
"""In the path of each file of DataLoader."""

Frame = tuple[str, str, str]
"""File, line, function."""


def threads(text: str) -> list[list[Frame]]:
    """The frames of each thread, inner to outer. The main thread is the last, as ``faulthandler`` writes it."""
    return [frames for block in re.split(r"\n\s*\n", text) if (frames := _FRAME.findall(block))]


def position(frames: list[Frame]) -> str:
    """The innermost line outside libraries; if there is none, the innermost line."""
    own = [frame for frame in frames if not _is_library(frame)]
    file, line, function = (own or frames)[0]
    return f"{file}, line {line}, {function}"


def place(text: str) -> str:
    """Where the main thread is: the user's line, and the function of a library that it called; empty if not known.

    ``Cell In[3], line 6, in DataLoader``. Of collectives the line alone.
    """
    found = threads(text)
    if not found:
        return ""
    main = found[-1]
    own = _innermost_own(main)
    if own is None:
        return position(main)
    file, line, function = main[own]
    between = [frame for frame in main[:own] if frame[2] not in _WRAPPERS and not frame[0].startswith(OURS)]
    called = next(reversed(between), None)
    if called is not None:
        function = _library_function(called)
    return f"{file}, line {line}" + ("" if function == "<module>" else f", in {function}")


def in_loader(text: str) -> bool:
    """Whether the main thread waits in a DataLoader, which may wait for its workers."""
    found = threads(text)
    return bool(found) and any(LOADER in file for file, _, _ in found[-1])


def in_user_code(text: str) -> bool:
    """Whether the main thread runs a line outside libraries."""
    found = threads(text)
    return bool(found) and _innermost_own(found[-1]) is not None


def _innermost_own(frames: list[Frame]) -> int | None:
    return next((index for index, frame in enumerate(frames) if not _is_library(frame)), None)


def _library_function(frame: Frame) -> str:
    """``DataLoader``, ``queue.get``; empty for a collective of ``torch.distributed``."""
    file, _, function = frame
    if LOADER in file:
        return "DataLoader"
    module = _PACKAGES.sub("", file).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if module.startswith("torch.distributed."):
        return "<module>" if _COLLECTIVES.match(function) else function
    return f"{module}.{function}"


def _is_library(frame: Frame) -> bool:
    return bool(_LIBRARY.search(frame[0])) or frame[0].startswith(OURS)
