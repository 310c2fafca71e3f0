"""Which object inside a captured object cannot be pickled, and the path to it. Searched only after a failure."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import pickle
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from . import refusals
from .pickler import Pickler

_TRIALS = 2000
_WIDTH = 100_000
_PATH = 160
"""The largest number of characters shown of a path, half of them from each end."""


@dataclass(frozen=True)
class Culprit:
    """``path`` is an expression such as ``trainer.callbacks[2]._thread``; ``kind`` is the type's name."""

    path: str
    kind: str
    reason: str

    @property
    def sentence(self) -> str:
        whole = len(self.path) <= _PATH
        path = self.path if whole else f"{self.path[: _PATH // 2]}…{self.path[-_PATH // 2 :]}"
        return f"{path}: {self.kind}: {self.reason}" if self.reason else f"{path}: {self.kind}"


def explain(value: Any, name: str, error: Exception) -> Culprit:
    """Follow the failure from ``value`` down to the object that causes it; ``error`` is what pickling raised."""
    path, current, reason = name, value, error
    trials = _TRIALS
    seen = {id(value)}
    while trials > 0 and refusals.reason(type(current)) is None and not _of_this_package(current):
        for label, child in itertools.islice(_safely(_children(current)), _WIDTH):
            if id(child) in seen or isinstance(child, (str, bytes, int, float, type(None))):
                continue
            seen.add(id(child))
            trials -= 1
            failure = _failure(child)
            if failure is not None:
                path, current, reason = path + label, child, failure
                break
            if trials <= 0:
                break
        else:
            break
    return Culprit(path, kind_name(type(current)), _words(reason, current))


def kind_name(kind: type) -> str:
    """The type's name with its module: ``_thread.lock``."""
    module = kind.__module__
    return kind.__qualname__ if module in ("builtins", "__main__") else f"{module}.{kind.__qualname__}"


def _of_this_package(value: Any) -> bool:
    """Whether the path to a part of the object would tell a user nothing."""
    return type(value).__module__.partition(".")[0] == __name__.partition(".")[0]


def _failure(value: Any) -> Exception | None:
    """Why the value alone cannot be pickled (the globals of its functions are not followed)."""
    try:
        pickler = Pickler(io.BytesIO(), vars(sys.modules["__main__"]))
        pickler.begin()
        pickler.dump(value)
    except Exception as error:  # noqa: BLE001  # the user's own reducers run here and may raise anything
        return without_frames(error)
    return None


def without_frames(error: Exception) -> Exception:
    """The exception without tracebacks, also in its causes: their frames keep the pickled objects alive."""
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is not None and link.__traceback__ is not None:
            link.__traceback__ = None
            waiting += link.__cause__, link.__context__
    return error


def _words(error: Exception, value: Any) -> str:
    if _of_this_package(value):
        return "it belongs to this process"
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
        if _own(value, "__getattribute__"):
            return "its __getattribute__ calls itself without end"
        return "it is nested too deeply, or its __reduce__ never ends"
    text = str(error)
    if isinstance(error, pickle.PicklingError) or text.startswith("cannot pickle"):
        return text
    return f"pickling it raised {type(error).__name__}: {text}"


def _own(value: Any, name: str) -> bool:
    """Whether the object's class defines the method in Python."""
    return isinstance(getattr(type(value), name, None), types.FunctionType)


def _safely(children: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """``children`` up to the first error: reading them runs the object's own code, which may raise anything."""
    with contextlib.suppress(Exception):
        yield from children


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """Pairs of a suffix for the path and an object, for all objects that pickling would follow."""
    if isinstance(value, Mapping) and not isinstance(value, types.MappingProxyType):
        for key, item in list(value.items()):
            yield f"[{_short(key)}]", item
            yield f" (key {_short(key)})", key
    elif isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((f" (element {_short(item)})", item) for item in value)
    if isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
    elif isinstance(value, functools.partial):
        yield ".func", value.func
        yield ".args", value.args
        yield ".keywords", value.keywords
    elif isinstance(value, types.FunctionType):
        yield from _function_children(value)
    elif isinstance(value, type):
        yield from ((f".{name}", item) for name, item in list(vars(value).items()))
    elif isinstance(value, types.ModuleType):
        names = [(f".{name}", item) for name, item in vars(value).items() if name != "__builtins__"]
        yield from sorted(names, key=lambda name: isinstance(name[1], (type, types.FunctionType)))  # code last
    elif isinstance(value, (property, staticmethod, classmethod)):
        yield "", getattr(value, "fget", None) or getattr(value, "__func__", None)
    else:
        yield from _attributes(value)


def _function_children(value: types.FunctionType) -> Iterator[tuple[str, Any]]:
    names = value.__code__.co_freevars
    for name, cell in zip(names, value.__closure__ or (), strict=False):
        try:
            yield f" (its variable {name})", cell.cell_contents
        except ValueError:
            continue
    for index, item in enumerate(value.__defaults__ or ()):
        yield f".__defaults__[{index}]", item
    for name, item in (value.__kwdefaults__ or {}).items():
        yield f".__kwdefaults__[{name!r}]", item
    yield from ((f".{name}", item) for name, item in list(vars(value).items()))


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    state = getattr(value, "__dict__", None)
    custom = _reduced_state(value)
    if isinstance(custom, dict):
        state = custom
    if isinstance(state, dict):
        yield from ((f".{name}", item) for name, item in list(state.items()))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if not name.startswith("__"):
                yield from ((f".{name}", getattr(value, name)) for _ in (0,) if hasattr(value, name))
    if not isinstance(state, dict):
        yield from _arguments(value)


def _reduced_state(value: Any) -> Any:
    try:
        reduced = value.__reduce_ex__(5)
    except Exception:  # noqa: BLE001  # the user's own reducers run here and may raise anything
        return None
    return reduced[2] if isinstance(reduced, tuple) and len(reduced) > 2 else None


def _arguments(value: Any) -> Iterator[tuple[str, Any]]:
    try:
        reduced = value.__reduce_ex__(5)
    except Exception:  # noqa: BLE001  # the user's own reducers run here and may raise anything
        return
    if isinstance(reduced, tuple) and len(reduced) > 1 and isinstance(reduced[1], tuple):
        yield from ((f" (part {index} of its pickle)", item) for index, item in enumerate(reduced[1]))


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  # the user's own __repr__ may raise anything
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 40 else text[:37] + "…"
