"""The state of this process as part of a capture: what is read, and how the receipt tells of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..protocol.bundle import Captured
from ..states import Found, Place, adapter_of, differing, told

NEEDED = "all code"
"""In the receipt's column of lines that need it."""


def found(namespace: Mapping[str, Any], stateless: bool) -> Found:
    """What travels; nothing for code that has nothing of this process."""
    return Found({}, ()) if stateless else differing(Place.notebook(namespace, running=True))


def receipt(state: Found, sizes: Mapping[str, int]) -> Iterator[Captured]:
    """A line for each kind of state of which something is in the stream, with ``sizes`` by name."""
    for adapter, words in told({name: value for name, value in state.values.items() if name in sizes}):
        own = sum(size for name, size in sizes.items() if adapter_of(name) == adapter)
        yield Captured(adapter, "state", words, own, NEEDED)
