"""matplotlib's rcParams without the backend: ranks draw without a screen, and the notebook shows their figures."""

from __future__ import annotations

import sys
from typing import Any

from .base import Adapter, Place, State, Usual, each

_OF_THE_PROCESS = frozenset({"backend", "backend_fallback", "interactive", "toolbar"})


def _matplotlib() -> Any:
    return sys.modules["matplotlib"]


def _fresh(key: str) -> Any:
    """The value from the user's ``matplotlibrc``, which ranks read, too."""
    return dict.get(_matplotlib().rcParamsOrig, key)


def read(place: Place) -> State:
    # With methods of ``dict``: the own methods of rcParams resolve the backend and warn about old names.
    return {key: value for key, value in dict.items(_matplotlib().rcParams) if key not in _OF_THE_PROCESS}


def write(state: State, place: Place) -> None:
    each(state, _matplotlib().rcParams.__setitem__)


ADAPTER = Adapter("matplotlib settings", "matplotlib", read, write, Usual({}, _fresh))
