"""pandas: its options, accessors that the notebook registered, ``tqdm.pandas()``."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from .base import Adapter, Place, State, Usual, each

_ACCESSOR = "accessor "
_TQDM = "tqdm.pandas"
_REGISTER = {
    "DataFrame": "register_dataframe_accessor",
    "Series": "register_series_accessor",
    "Index": "register_index_accessor",
}


def _pandas() -> Any:
    return sys.modules["pandas"]


def _options() -> Any:
    return sys.modules["pandas._config.config"]


def read(place: Place) -> State:
    return {**dict(_flat(_options()._global_config)), **dict(_accessors()), **_progress()}


def _flat(options: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Options such as ``display.max_rows``. ``get_option`` searches for each name, which takes ten times as long."""
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield path + name, value


def _accessors() -> Iterator[tuple[str, type]]:
    for owner in _REGISTER:
        kind = getattr(_pandas(), owner)
        for name in sorted(kind._accessors):
            accessor = getattr(vars(kind).get(name), "_accessor", None)
            if isinstance(accessor, type) and accessor.__module__ == "__main__":
                yield f"{_ACCESSOR}{owner}.{name}", accessor


def _progress() -> State:
    """The arguments of ``tqdm.pandas``; only the functions that it made contain them."""
    applied = vars(_pandas().DataFrame).get("progress_apply")
    if applied is None:
        return {}
    known = dict(zip(applied.__code__.co_freevars, applied.__closure__ or (), strict=False))
    return {_TQDM: dict(known["tqdm_kwargs"].cell_contents) if "tqdm_kwargs" in known else {}}


def write(state: State, place: Place) -> None:
    each(state, _write)


def _write(key: str, value: Any) -> None:
    if key == _TQDM:
        import_module("tqdm.auto").tqdm.pandas(**value)
    elif key.startswith(_ACCESSOR):
        owner, _, name = key.removeprefix(_ACCESSOR).partition(".")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # an accessor of that name may exist
            getattr(_pandas().api.extensions, _REGISTER[owner])(name)(value)
    else:
        _pandas().set_option(key, value)


def _fresh(key: str) -> Any:
    known = _options()._registered_options.get(key)
    return _NOWHERE if known is None else known.defval


_NOWHERE = object()

ADAPTER = Adapter("pandas settings", "pandas", read, write, Usual({}, _fresh))
