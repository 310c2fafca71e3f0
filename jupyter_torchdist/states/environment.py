"""Variables of the environment that a cell sets: those whose names stand in its text.

Libraries set others, and each rank has its own. The notebook's go to the ranks with the job, not with its state.
"""

from __future__ import annotations

import os
import re

from .base import Adapter, Place, State, each

_NAME = re.compile(r"\b[A-Za-z_][A-Z0-9_]+\b")


def read(place: Place) -> State:
    if place.rank is None or not any("environ" in text or "putenv" in text for text in place.texts):
        return {}
    return {name: os.environ.get(name) for text in place.texts for name in _NAME.findall(text)}


def write(state: State, place: Place) -> None:
    each(state, _write)


def _write(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


ADAPTER = Adapter("environment", "os", read, write, usual={})
