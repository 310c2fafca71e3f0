"""The interface of adapters, and the description of the process in which they work."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

State = dict[str, Any]
"""The parts of one kind of state, by key. Each part travels, or is left behind, independently."""


@dataclass(frozen=True)
class Place:
    """The process whose state is read or written."""

    texts: tuple[str, ...] = ()
    """Source of the user's code that has run or runs; it tells which generators were seeded."""
    rank: int | None = None
    """None in the notebook."""
    device: str = "cpu"
    """The device of the rank, such as ``cuda:1``."""

    @staticmethod
    def notebook(namespace: Mapping[str, Any], *, running: bool = False) -> Place:
        """This process, with the text of its cells or its script. ``running``: without the current ``%%distribute``
        cell, which has not run yet."""
        cells = namespace.get("In")
        if not isinstance(cells, list):
            return Place(("".join(linecache.getlines(str(namespace.get("__file__", "")))),))
        last = -1 if running and cells and "run_cell_magic('distribute'" in str(cells[-1]) else None
        return Place(tuple(map(str, cells[:last])))


@dataclass(frozen=True)
class Stays:
    """Replaces a part of a state that cannot travel; the user sees the reason."""

    reason: str


class Usual(dict[str, Any]):
    """The state of a fresh process if its keys cannot be listed: ``otherwise`` gives the value of other keys."""

    def __init__(self, known: State, otherwise: Callable[[str], Any]) -> None:
        super().__init__(known)
        self._otherwise = otherwise

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else self._otherwise(key)


def by_keys(state: State) -> str:
    return ", ".join(state)


def at_once(state: State) -> Mapping[str, State]:
    """No part waits for an import."""
    return {}


@dataclass(frozen=True)
class Adapter:
    """One kind of state. Its functions may raise anything: this becomes a note, and the job continues."""

    name: str
    module: str
    """The state is read if this module is loaded, and written when it is loaded."""
    read: Callable[[Place], State]
    """Returns the complete state."""
    write: Callable[[State, Place], None]
    """Writes some parts of the state. Raises errors after it has written all parts that can be written."""
    usual: State
    """The state of a fresh process. A part whose key is missing here always travels."""
    words: Callable[[State], str] = by_keys
    """Describes some parts, for the receipt."""
    later: Callable[[State], Mapping[str, State]] = at_once
    """{module: parts to write again after the import of that module, because the import sets them}."""


class NotSet(Exception):
    """Parts of a state that could not be written, each with the reason."""


def each(state: State, write: Callable[[str, Any], None]) -> None:
    """Write every part, even if others fail. Raises ``NotSet`` at the end if any failed."""
    failed = []
    for key, value in state.items():
        try:
            write(key, value)
        except Exception as error:  # noqa: BLE001  # another version of the library
            failed.append(f"{key} ({said(error)})")
    if failed:
        raise NotSet(", ".join(failed))


def said(error: Exception) -> str:
    """An exception in one line."""
    text = str(error).partition("\n")[0]
    return text if isinstance(error, NotSet) else f"{type(error).__name__}: {text}"
