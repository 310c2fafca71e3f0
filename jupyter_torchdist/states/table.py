"""The table of adapters, and its functions for the kernel and the ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from . import (
    environment,
    import_path,
    imports,
    logs,
    numpy_settings,
    operators,
    plotting,
    python_settings,
    randoms,
    tables,
    torch_settings,
    working_directory,
)
from .base import Adapter, Place, State, Stays, said

TABLE: tuple[Adapter, ...] = (
    import_path.ADAPTER,
    randoms.ADAPTER,
    torch_settings.ADAPTER,
    operators.ADAPTER,
    python_settings.ADAPTER,
    logs.ADAPTER,
    numpy_settings.ADAPTER,
    plotting.ADAPTER,
    tables.ADAPTER,
    environment.ADAPTER,
    working_directory.ADAPTER,
    imports.ADAPTER,
)
_BY_NAME = {adapter.name: adapter for adapter in TABLE}

_NONE = object()


@dataclass(frozen=True)
class Found:
    """``values`` travel, by name. ``notes``: which states do not travel, and which could not be read."""

    values: dict[str, Any]
    notes: tuple[str, ...]


def name_of(adapter: Adapter, key: str) -> str:
    """``torch settings: default dtype``; no Python name can be like this."""
    return f"{adapter.name}: {key}"


def adapter_of(name: str) -> str | None:
    """The adapter of a state's name in a bundle or in results; None for all other names."""
    adapter = name.partition(": ")[0]
    return adapter if adapter in _BY_NAME and adapter != name else None


def differing(place: Place) -> Found:
    """The state of this process that differs from a fresh process."""
    values: dict[str, Any] = {}
    notes: list[str] = []
    for adapter in TABLE:
        if adapter.module not in sys.modules:
            continue
        try:
            found = changed(adapter.read(place), {}, adapter.usual)
        except Exception as error:  # noqa: BLE001  # another version of a library
            notes.append(f"{adapter.name} could not be read: {said(error)}")
        else:
            notes += _staying(adapter, found)
            values |= named(adapter, found)
    return Found(values, tuple(notes))


def told(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of an adapter and a description of its states, for some values of ``Found``."""
    for name, state in take(dict(values)).items():
        yield name, _BY_NAME[name].words(state)


def _staying(adapter: Adapter, found: State) -> list[str]:
    """Remove the parts that do not travel from ``found``, and return notes on them."""
    stays = [key for key, value in found.items() if isinstance(value, Stays)]
    return [f"{name_of(adapter, key)} stay in the notebook: {found.pop(key).reason}" for key in stays]


def named(adapter: Adapter, state: State) -> dict[str, Any]:
    """The parts by their names, without parts that do not travel."""
    return {name_of(adapter, key): value for key, value in state.items() if not isinstance(value, Stays)}


def changed(now: State, before: State, usual: Mapping[str, Any]) -> State:
    """The parts of ``now`` that differ from ``before``, or from ``usual`` if ``before`` does not have them."""
    return {
        key: value
        for key, value in now.items()
        if not _same(value, before[key] if key in before else usual.get(key, _NONE))
    }


def _same(value: Any, other: Any) -> bool:
    try:
        return value is other or bool(value == other)
    except Exception:  # noqa: BLE001  # the user's own __eq__, or an array's
        return False


def take(names: dict[str, Any]) -> dict[str, State]:
    """Remove the states from ``names`` and return them by adapter."""
    taken: dict[str, State] = {}
    for name in [name for name in names if adapter_of(name)]:
        adapter, _, key = name.partition(": ")
        taken.setdefault(adapter, {})[key] = names.pop(name)
    return taken


def write_early(names: Mapping[str, Any]) -> None:
    """Write the part of the state that is needed to rebuild what comes after it."""
    found = {name: value for name, value in names.items() if adapter_of(name) == import_path.ADAPTER.name}
    import_path.write(take(found).get(import_path.ADAPTER.name, {}), Place())


def write_back(taken: Mapping[str, State], place: Place) -> tuple[str, ...]:
    """Write states that came back into this process, if their library is loaded. Returns notes on errors."""
    notes = []
    for name, state in taken.items():
        adapter = _BY_NAME[name]
        if adapter.module in sys.modules:
            notes += write(adapter, state, place)
    return tuple(notes)


def write(adapter: Adapter, state: State, place: Place) -> list[str]:
    """Write parts of an adapter's state. Returns notes on errors."""
    try:
        adapter.write(state, place)
    except Exception as error:  # noqa: BLE001  # another version of a library; the user's own code
        where = "in the notebook" if place.rank is None else "on the ranks"
        return [f"{adapter.name} could not be set {where}: {said(error)}"]
    return []
