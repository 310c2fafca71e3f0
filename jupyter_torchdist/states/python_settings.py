"""Settings of Python for the complete process: warning filters, the decimal context, the recursion limit.

Libraries add filters when they are imported, also on ranks. Therefore filters travel only if a cell has set some.
"""

from __future__ import annotations

import decimal
import re
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from .base import Adapter, Place, State, each

_SETS = re.compile(r"\b(filterwarnings|simplefilter|resetwarnings)\b")
_FILTERS = "warning filters"
_PATTERN, _FLAGS = 0, 1


def read(place: Place) -> State:
    context = decimal.getcontext()
    state: State = {"recursion limit": sys.getrecursionlimit(), "decimal context": _context(context)}
    if any("warn" in text or "simplefilter" in text for text in place.texts) and any(map(_SETS.search, place.texts)):
        state[_FILTERS] = [_told(one) for one in warnings.filters]
    return state


def _context(context: decimal.Context) -> dict[str, Any]:
    names = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
    traps = sorted(signal.__name__ for signal, on in context.traps.items() if on)
    return {**{name: getattr(context, name) for name in names}, "traps": traps}


def _told(entry: tuple[Any, ...]) -> tuple[Any, ...]:
    """A filter as plain data. A library's category is given by name, because ranks may not have imported it."""
    action, message, category, module, line = entry
    known = category.__module__ in ("builtins", "__main__")
    reference = category if known else (category.__module__, category.__qualname__)
    return action, _pattern(message), reference, _pattern(module), line


def _pattern(value: Any) -> Any:
    return (value.pattern, value.flags) if isinstance(value, re.Pattern) else value


def write(state: State, place: Place) -> None:
    each(state, _write)


def _write(key: str, value: Any) -> None:
    if key == "recursion limit":
        sys.setrecursionlimit(value)
    elif key == "decimal context":
        traps = [getattr(decimal, name) for name in value["traps"]]
        decimal.setcontext(decimal.Context(**{**value, "traps": traps}))
    else:
        _set_filters(value)


def _set_filters(told: list[tuple[Any, ...]]) -> None:
    """Set the filters of the notebook first, then the other filters of this process."""
    sent = [one for entry in told if (one := _entry(entry)) is not None]
    there = [one for one in warnings.filters if _told(one) not in told]
    warnings.resetwarnings()
    for action, message, category, module, line in [*sent, *there]:
        warnings.simplefilter(action, category, line, append=True)
        warnings.filters[-1] = (action, message, category, module, line)  # type: ignore[index]


def _entry(told: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The filter, or None if the library with its category is not imported."""
    action, message, category, module, line = told
    if isinstance(category, tuple):
        category = getattr(sys.modules.get(category[0]), category[1], None)
    return None if category is None else (action, _compiled(message), category, _compiled(module), line)


def _compiled(value: Any) -> Any:
    return re.compile(value[_PATTERN], value[_FLAGS]) if isinstance(value, tuple) else value


def later(state: State) -> Mapping[str, State]:
    """Filters with a library's category are set again when the library is imported."""
    modules = {one[2][0] for one in state.get(_FILTERS, ()) if isinstance(one[2], tuple)}
    return {module: {_FILTERS: state[_FILTERS]} for module in modules if module not in sys.modules}


def words(state: State) -> str:
    return ", ".join(f"{key} {value}" if isinstance(value, int) else key for key, value in state.items())


USUAL = {"recursion limit": 1000, "decimal context": _context(decimal.DefaultContext)}

ADAPTER = Adapter("Python settings", "sys", read, write, USUAL, words, later)
