"""The notebook's state in a rank: applied before user code runs. Afterwards: what the code has changed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

from .. import states
from ..states import Adapter, Place, State
from .afterimport import after_import


class Carried:
    """``say`` shows the user one line."""

    def __init__(self, names: dict[str, Any], place: Place, say: Callable[[str], None], unread: str = "") -> None:
        """Removes the states from ``names`` and applies each, now or right after the import of its library.

        ``unread``: why some states could not be rebuilt.
        """
        self._place, self._say = place, say
        self._before: dict[str, State] = {}
        if unread:
            say(f"some state of the notebook is missing on the ranks: {unread}")
        sent = states.take(names)
        for adapter in states.TABLE:
            state = sent.get(adapter.name, {})
            after_import({adapter.module: partial(self._begin, adapter, state)})
            after_import({module: partial(self._write, adapter, part) for module, part in adapter.later(state).items()})

    def _begin(self, adapter: Adapter, state: State, _module: ModuleType) -> None:
        if state:
            self._tell(states.write(adapter, state, self._place))
        self._before[adapter.name] = self._read(adapter)

    def _write(self, adapter: Adapter, part: State, _module: ModuleType) -> None:
        """Apply a part of the state again, which the import of a library has overwritten."""
        self._tell(states.write(adapter, part, self._place))
        now = self._read(adapter)
        self._before.get(adapter.name, {}).update({key: now[key] for key in part if key in now})

    def _read(self, adapter: Adapter) -> State:
        try:
            return adapter.read(self._place)
        except Exception as error:  # noqa: BLE001  # another version of the library
            self._tell([f"{adapter.name} could not be read on the ranks: {states.said(error)}"])
            return {}

    def _tell(self, notes: list[str]) -> None:
        for note in notes:
            self._say(note)

    def changes(self) -> dict[str, Any]:
        """The state that user code has changed, by name in the results."""
        return dict(item for adapter in states.TABLE for item in self._changes_of(adapter))

    def _changes_of(self, adapter: Adapter) -> Iterator[tuple[str, Any]]:
        if adapter.module in sys.modules and (before := self._before.get(adapter.name)) is not None:
            yield from states.named(adapter, states.changed(self._read(adapter), before, adapter.usual)).items()
