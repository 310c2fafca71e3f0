"""The state of this process as part of a capture: which values are read, and their lines in the receipt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..protocol.bundle import Captured
from ..states import Found, Place, adapter_of, differing, told

NEEDED = "all code"
"""The text in the receipt's column "which line needs it"."""


def found(namespace: Mapping[str, Any], stateless: bool) -> Found:
    """The state that travels; none for ``stateless`` code."""
    return Found({}, ()) if stateless else differing(Place.notebook(namespace, running=True))


def receipt(state: Found, sizes: Mapping[str, int]) -> Iterator[Captured]:
    """A line for each kind of state that the stream contains; ``sizes`` are the bytes of each name."""
    for adapter, words in told({name: value for name, value in state.values.items() if name in sizes}):
        own = sum(size for name, size in sizes.items() if adapter_of(name) == adapter)
        yield Captured(adapter, "state", words, own, NEEDED)
