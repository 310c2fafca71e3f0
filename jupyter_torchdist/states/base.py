"""What an adapter is, and what it is told of the process it works in."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

State = dict[str, Any]
"""The parts of one kind of state by key; each part travels, and is left behind, by itself."""


@dataclass(frozen=True)
class Place:
    """The process whose state is read or written."""

    texts: tuple[str, ...] = ()
    """Source of the user's code that has run, or runs: what was seeded is known from it."""
    rank: int | None = None
    """None in the notebook."""
    device: str = "cpu"
    """The rank's own, such as ``cuda:1``."""

    @staticmethod
    def notebook(namespace: Mapping[str, Any], *, running: bool = False) -> Place:
        """This process, by its history of cells, or by its script. Without the cell under ``%%distribute`` that is
        ``running``: nothing of it has run yet."""
        cells = namespace.get("In")
        if not isinstance(cells, list):
            return Place(("".join(linecache.getlines(str(namespace.get("__file__", "")))),))
        last = -1 if running and cells and "run_cell_magic('distribute'" in str(cells[-1]) else None
        return Place(tuple(map(str, cells[:last])))


@dataclass(frozen=True)
class Stays:
    """In place of a part of a state: it cannot go along, and the user is told why."""

    reason: str


class Usual(dict[str, Any]):
    """What a fresh process has, where keys cannot be listed: ``otherwise`` is asked for those that are not here."""

    def __init__(self, known: State, otherwise: Callable[[str], Any]) -> None:
        super().__init__(known)
        self._otherwise = otherwise

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else self._otherwise(key)


def by_keys(state: State) -> str:
    return ", ".join(state)


def at_once(state: State) -> Mapping[str, State]:
    """Nothing waits for a library."""
    return {}


@dataclass(frozen=True)
class Adapter:
    """One kind of state. Its functions may raise anything: that is noted, and the job goes on."""

    name: str
    module: str
    """The state is read where this module is loaded, and written once it is."""
    read: Callable[[Place], State]
    """All of it."""
    write: Callable[[State, Place], None]
    """Some of it. Raises what goes wrong, after having written what can be."""
    usual: State
    """What a fresh process has. A key that is not here is always worth telling."""
    words: Callable[[State], str] = by_keys
    """What goes along, for the receipt."""
    later: Callable[[State], Mapping[str, State]] = at_once
    """{module: parts to write once more when that module has been imported, which sets them up by itself}."""


class NotSet(Exception):
    """Parts of a state that could not be written, each with the reason."""


def each(state: State, write: Callable[[str, Any], None]) -> None:
    """Write every part, whatever becomes of the others. Raises ``NotSet`` when all are through."""
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
