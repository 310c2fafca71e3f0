"""Tells the user of files that a single-device cell opens for writing: every rank runs the cell, and writes them."""

from __future__ import annotations

import builtins
import io
import os
import sys
import tempfile
from collections.abc import Callable
from types import FrameType
from typing import Any

from ...usercode.frames import is_users
from .context import ParallelContext
from .patches import Patches

_ON_BEHALF = ("pathlib", "pandas.", "numpy.", "logging")
"""Libraries that open a file for the user who calls them."""


def install(patches: Patches, context: ParallelContext) -> None:
    """While user code runs, the first file that it opens for writing is told."""
    ranks = context.mesh.size()
    told = ranks == 1

    def opening(original: Callable[..., Any], file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
        nonlocal told
        if not told and isinstance(mode, str) and set(mode) & set("wax+") and _is_shared(file):
            line = _users_line()
            if line is not None:
                told = True
                context.say(
                    f"line {line} opens {os.path.basename(os.fsdecode(file))} for writing, and each of the {ranks} "
                    "ranks does so (to write it once: import jupyter_torchdist as td, then if td.is_main: before it)"
                )
        return original(file, mode, *args, **kwargs)

    patches.around(builtins, "open", opening)
    patches.around(io, "open", opening)


def _is_shared(file: Any) -> bool:
    """Whether ``file`` is a path that may be the same on all ranks."""
    if not isinstance(file, (str, bytes, os.PathLike)):
        return False
    path = os.path.abspath(os.fsdecode(file))
    return not path.startswith((os.path.join(tempfile.gettempdir(), "tmp"), "/dev/", "/proc/"))


def _users_line() -> int | None:
    """The user's line that opens a file now, also through a library in ``_ON_BEHALF``; None for other callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name != __name__ and not name.startswith((__package__, *_ON_BEHALF)):
            break
        frame = frame.f_back
    return frame.f_lineno if frame is not None and is_users(frame.f_code.co_filename) else None
