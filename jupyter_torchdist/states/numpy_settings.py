"""NumPy's print options and error handling (division by zero, overflow…)."""

from __future__ import annotations

import sys
from typing import Any

from .base import Adapter, Place, State, each

_PRINTED = {
    "edgeitems": 3,
    "threshold": 1000,
    "floatmode": "maxprec",
    "precision": 8,
    "suppress": False,
    "linewidth": 75,
    "nanstr": "nan",
    "infstr": "inf",
    "sign": "-",
    "formatter": None,
    "legacy": False,
}
_ERRORS = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}


def _numpy() -> Any:
    return sys.modules["numpy"]


def read(place: Place) -> State:
    options = _numpy().get_printoptions()
    printed = {f"print {key}": options[key] for key in _PRINTED if key in options}
    return {**printed, **{f"on {key}": value for key, value in _numpy().geterr().items()}}


def write(state: State, place: Place) -> None:
    each(state, _write)


def _write(key: str, value: Any) -> None:
    setter = _numpy().set_printoptions if key.startswith("print ") else _numpy().seterr
    setter(**{key.partition(" ")[2]: value})


def words(state: State) -> str:
    return ", ".join(f"{key} {value}" for key, value in state.items() if isinstance(value, (str, int, bool)))


USUAL = {f"print {key}": value for key, value in _PRINTED.items()} | {f"on {key}": one for key, one in _ERRORS.items()}

ADAPTER = Adapter("NumPy settings", "numpy", read, write, USUAL, words)
