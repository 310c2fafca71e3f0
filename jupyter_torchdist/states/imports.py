"""Submodules that a cell imports: ``import scipy.stats`` binds ``scipy``, which alone comes back as a name."""

from __future__ import annotations

import importlib
import re
import sys

from .base import Adapter, Place, State, each

_IMPORT = re.compile(r"^[ \t]*import[ \t]+([^#;\n]+)", re.MULTILINE)


class _Told:
    """Differs from every other: a warm rank has imported the module before the cell does."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return False


def read(place: Place) -> State:
    if place.rank is None:
        return {}
    imported = (part.split() for text in place.texts for found in _IMPORT.findall(text) for part in found.split(","))
    names = [words[0] for words in imported if len(words) == 1 and "." in words[0]]
    return {name: _Told() for name in names if name in sys.modules}


def write(state: State, place: Place) -> None:
    each(state, lambda name, _: _import(name))


def _import(name: str) -> None:
    importlib.import_module(name)


ADAPTER = Adapter("submodules", "sys", read, write, usual={})
