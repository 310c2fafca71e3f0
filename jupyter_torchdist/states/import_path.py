"""Entries of ``sys.path`` that a cell adds. The notebook's go to the ranks with the job, not with its state."""

from __future__ import annotations

import os
import sys

from .base import Adapter, Place, State

FRONT, END = "front", "end"


def read(place: Place) -> State:
    """{entry: whether it stands before or behind the standard library}."""
    if place.rank is None:
        return {}
    library = os.path.dirname(os.__file__)
    middle = sys.path.index(library) if library in sys.path else 0
    return {entry: FRONT if index < middle else END for index, entry in reversed(list(enumerate(sys.path)))}


def write(state: State, place: Place) -> None:
    """Entries for the front come in reversed order."""
    for entry, where in state.items():
        if entry not in sys.path:
            sys.path.insert(0 if where == FRONT else len(sys.path), entry)


ADAPTER = Adapter("import path", "sys", read, write, usual={})
