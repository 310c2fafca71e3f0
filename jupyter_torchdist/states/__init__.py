"""The state of a process beside the names in it: random numbers, default dtype, logging levels, print options…

One table, an adapter for each kind of state (``base.Adapter``). A job uses it three times::

    kernel   differing(place) -> Found          what differs from a fresh process; it travels with the captured names
    rank     take(names), Adapter.write         applied before user code; afterwards rank 0 sends what has changed
    kernel   take(values), write_back(...)      so that the next cell goes on from there

Each state is a name of the bundle and of the results, ``torch settings: default dtype``, which no name of Python can
be. So values travel as all others do: a class of the notebook is what it is on both sides, and a state that cannot be
pickled is left behind by itself, with a note.

Nothing is imported here: a state is read where its library is loaded already, and applied when it is, or will be.
What an adapter raises never ends a job: it becomes a note.
"""

from __future__ import annotations

from .base import Adapter, Place, State, said
from .table import TABLE, Found, adapter_of, changed, differing, named, take, told, write, write_back

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
]
