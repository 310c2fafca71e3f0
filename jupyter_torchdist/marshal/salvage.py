"""Reads results of which one value cannot be rebuilt here: the others come, but for those that share objects with it.

The parts of a results file are pickles with one memo. A part that cannot be rebuilt is replaced by a filler, which
takes its places in the memo and its buffers. Parts that refer to a place of a filler are replaced, too.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

_GETS = frozenset({"BINGET", "LONG_BINGET"})
_HEAD = b"\x80\x05"
_NONE_IN_MEMO, _BUFFER, _EMPTY = b"N\x940", b"\x970", b"}."
"""Opcodes: None into the next place of the memo; the next buffer; an empty dictionary, which ends the pickle."""

Load = Callable[[], Any]


@dataclass
class _Part:
    start: int
    stop: int = 0
    name: str = ""
    """The name of the value in the part; empty for the state of an object."""
    places: range = range(0)
    uses: set[int] = field(default_factory=set)
    """Places of earlier parts."""
    buffers: int = 0

    def filler(self) -> bytes:
        return _HEAD + _NONE_IN_MEMO * len(self.places) + _BUFFER * self.buffers + _EMPTY


Reasons = tuple[tuple[str, str], ...]


def rescued(content: bytes, reader: Callable[[IO[bytes]], Load]) -> tuple[list[Any], Reasons, Reasons]:
    """The parts that can be rebuilt, (name, reason) for the others, and what the file ends with.

    ``reader`` makes a function that loads a part. Raises ``ValueError`` for a file that is damaged.
    """
    *parts, _end, left = _parts(content)
    lost: dict[int, str] = {}
    while True:
        _spread(parts, lost)
        pieces = [part.filler() if at in lost else content[part.start : part.stop] for at, part in enumerate(parts)]
        load, found = reader(io.BytesIO(b"".join(pieces))), []
        for at in range(len(parts)):
            try:
                found.append(load())
            except Exception as error:  # noqa: BLE001  # rebuilding runs the user's own code, which may raise anything
                lost[at] = f"it cannot be rebuilt here: {type(error).__name__}: {error}"
                break
        else:
            unread = tuple((parts[at].name, why) for at, why in lost.items())
            return found, unread, pickle.loads(content[left.start :])


def _spread(parts: list[_Part], lost: dict[int, str]) -> None:
    """Add the parts that refer to objects of those that are lost."""
    places: dict[int, str] = {}
    for at, part in enumerate(parts):
        shared = next((places[place] for place in sorted(part.uses & places.keys())), None)
        if at not in lost and shared is not None:
            lost[at] = f"it shares an object with {shared}, which cannot be rebuilt here"
        if at in lost:
            places.update(dict.fromkeys(part.places, part.name or "an object of the notebook"))


def _parts(content: bytes) -> Iterator[_Part]:
    file, made = io.BytesIO(content), 0
    texts: dict[int, Any] = {}
    while (start := file.tell()) < len(content):
        part, first, head, last = _Part(start), made, "", None
        for opcode, argument, _ in pickletools.genops(file):
            if opcode.name == "MEMOIZE":
                texts[made] = last
                made += 1
                continue
            if opcode.name in _GETS:
                place = int(argument or 0)
                last = texts.get(place)
                part.uses |= {place} if place < first else set()
            else:
                last = argument if isinstance(argument, str) else None
            head = head or ("" if opcode.name in ("PROTO", "FRAME") else opcode.name)
            part.name = part.name or (last or "" if head == "EMPTY_DICT" else "")
            part.buffers += opcode.name == "NEXT_BUFFER"
        part.stop, part.places = file.tell(), range(first, made)
        yield part
