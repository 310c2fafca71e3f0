"""Which frames and files are the user's, decided by the location of the file."""

from __future__ import annotations

import functools
import gc
import importlib.util
import operator
import os
import re
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, chain, compress, repeat, takewhile
from pathlib import Path
from types import FrameType
from typing import Any

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


_call: Any = getattr(operator, "call", lambda function: function())
_PLACE = operator.attrgetter("f_code.co_filename", "f_lineno")


def places_of_main() -> list[tuple[str, int]]:
    """File and line of each frame of the main thread, from inner to outer, for another thread."""
    places: list[tuple[str, int]] = []
    main = threading.main_thread().ident or 0
    if sys.version_info[:2] == (3, 11):
        _without_collection(partial(places.extend, _walk(main)))
    else:
        places.extend(_walk(main))
    return places


def _walk(thread: int) -> Iterator[tuple[str, int]]:
    """Runs no Python code, and begins when it is asked for the first frame."""
    frame = map(operator.itemgetter(thread), map(_call, (sys._current_frames,)))
    outwards = accumulate(chain(frame, repeat("f_back")), getattr)
    return map(_PLACE, takewhile(bool, outwards))


def _without_collection(call: Callable[[], None]) -> None:
    """Python 3.11 makes the objects of frames when they are asked for, and may collect garbage then.

    If user code that this runs (``__del__``) lets the main thread go on, that thread may end the frame which is looked
    at: the process crashes or hangs. No Python code runs between the question whether garbage is collected and the
    answer to it, so no other thread can switch that on or off meanwhile.
    """
    on: list[bool] = []
    calls = partial(on.extend, map(_call, (gc.isenabled,))), gc.disable, call
    try:
        deque(map(_call, chain(calls, compress((gc.enable,), on))), maxlen=0)
    except BaseException:
        deque(map(_call, compress((gc.enable,), on)), maxlen=0)
        raise


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
