"""The state of a process outside its namespace: random numbers, default dtype, logging levels, print options…

A table has an adapter for each kind of state (``base.Adapter``). A job uses the table three times::

    kernel   differing(place) -> Found          what differs from a fresh process; it travels with the captured names
    rank     take(names), Adapter.write         applied before user code; afterwards rank 0 sends what has changed
    kernel   take(values), write_back(...)      the next cell continues with this state

In the bundle and in the results each state has a name such as ``torch settings: default dtype``, which is no valid
Python name. Its value travels like all other values: it shares classes with them, and if it cannot be pickled, only
this state is left behind, with a note.

This package imports no library: a state is read if its library is loaded, and applied when the library is loaded.
Errors of an adapter never end a job: they become notes.
"""

from __future__ import annotations

from .base import Adapter, Place, State, said
from .table import TABLE, Found, adapter_of, changed, differing, named, take, told, write, write_back, write_early

__all__ = [
    "TABLE",
    "Adapter",
    "Found",
    "Place",
    "State",
    "adapter_of",
    "changed",
    "differing",
    "named",
    "said",
    "take",
    "told",
    "write",
    "write_back",
    "write_early",
]
