"""Which frames and files are the user's, decided by the location of the file."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import operator
import os
import re
import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType

OURS = str(Path(__file__).parents[1]) + os.sep
"""This package's directory."""

NOWHERE = "<jupyter_torchdist>"
"""The file name of our code that torch.compile must not recognize as ours."""

_ENGINE = os.sep + os.path.join("torch", "distributed", "elastic") + os.sep
_STARTERS = ("<frozen runpy>", os.sep + "runpy.py")
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
"""Other directories of libraries: of a virtual environment's base interpreter, of the user, of the system."""


@functools.cache
def _libraries() -> tuple[str, ...]:
    torch = importlib.util.find_spec("torch")
    places = [] if torch is None else list(torch.submodule_search_locations or ())
    places += [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    return (*(place + os.sep for place in dict.fromkeys(places)), "<frozen")


_PLACE = operator.attrgetter("f_code.co_filename", "f_lineno")


def places_of_main() -> list[tuple[str, int]]:
    """File and line of each frame of the main thread, from inner to outer, for another thread.

    No Python code runs between two frames, so the main thread cannot end one that is looked at. A rank of Python 3.11
    was seen to crash where it could.
    """
    places: list[tuple[str, int]] = []
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    with contextlib.suppress(AttributeError):  # of None, which is around the outermost frame
        places.extend(map(_PLACE, itertools.accumulate(itertools.repeat("f_back"), getattr, initial=frame)))
    return places


def is_ours(filename: str) -> bool:
    """Whether a frame of this file belongs to the launcher, not to the user."""
    return filename.startswith((OURS, NOWHERE)) or _ENGINE in filename or filename.endswith(_STARTERS)


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's code, from ``frame`` outwards; None if there is none."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


@functools.lru_cache(maxsize=1024)
def is_users(filename: str) -> bool:
    """Whether a file contains the user's code: a cell, a script or a module beside the notebook, but no library."""
    library = filename.startswith(_libraries()) or _INSTALLED.search(filename)
    return not library and not is_ours(filename)
