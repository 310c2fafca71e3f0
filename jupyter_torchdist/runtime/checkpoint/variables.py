"""The plain variables of a cell that its loop changes: the list of losses, the best accuracy, a counter of steps."""

from __future__ import annotations

import pickle
from collections.abc import MutableMapping
from typing import Any

_LIMIT = 1 << 20
"""Bytes of a value that is kept."""

_ATOMS = (type(None), bool, int, float, complex, str, bytes)


class Variables:
    """Those of a namespace which are numbers, texts, or lists, tuples, sets and dictionaries of them.

    What had its value when this object was made and still has it belongs to the cell's text, not to its state:
    a learning rate or a number of epochs that was edited before the cell was resumed stays as edited.
    """

    def __init__(self, namespace: MutableMapping[str, Any]) -> None:
        self._namespace = namespace
        self._before = self._frozen()

    def changed(self) -> dict[str, Any]:
        """Names and values that have changed since."""
        frozen = self._frozen()
        return {name: pickle.loads(data) for name, data in frozen.items() if self._before.get(name) != data}

    def restore(self, values: dict[str, Any]) -> None:
        """Set them; lists, dictionaries and sets that are there are filled in place, so that all who hold them see."""
        for name, value in values.items():
            there: Any = self._namespace.get(name)
            if type(there) is not type(value) or there is value:
                self._namespace[name] = value
            elif isinstance(there, list):
                there[:] = value
            elif isinstance(there, (dict, set)):
                there.clear()
                there.update(value)
            else:
                self._namespace[name] = value

    def _frozen(self) -> dict[str, bytes]:
        return {
            name: data
            for name, value in list(self._namespace.items())
            if not name.startswith("_") and _is_plain(value) and len(data := pickle.dumps(value)) <= _LIMIT
        }


def _is_plain(value: Any, depth: int = 4) -> bool:
    kind = type(value)
    if kind in _ATOMS:
        return True
    if depth == 0:
        return False
    if kind in (list, tuple, set, frozenset):
        return all(_is_plain(item, depth - 1) for item in value)
    return kind is dict and all(_is_plain(item, depth - 1) for pair in value.items() for item in pair)
