"""``logging``: levels, handlers on stdout and stderr with their formatters and filters, names of levels.

Libraries set up their own loggers, also on the ranks. These travel only if a cell names them together with ``logging``
(``logging.getLogger("transformers").setLevel(…)``). They are then written again when the library is imported.

Handlers that append to a file write on rank 0 only; otherwise the file would contain each line several times.
Handlers that a cell makes for a new file (mode ``w``) come back, and append to it from then on.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from .base import Adapter, Place, State, Stays, Usual, each

_FRESH = (logging.NOTSET, True, False)
_LEVELS = {0: "NOTSET", 10: "DEBUG", 20: "INFO", 30: "WARNING", 40: "ERROR", 50: "CRITICAL"}
_ROOT = "root"
_NEVER = frozenset({"IPKernelApp", "IPython", "ipykernel", "jupyter_torchdist", "tornado", "traitlets"})
"""Loggers of the kernel and of this package."""
_TORCHS = ("strobelight_", "c10d-")
"""Prefixes of torch's loggers without ``torch`` in the name."""
_OF_THE_PROCESS = {"lock", "stream", "flush", "_closed"}
"""Attributes of a handler that differ in each process."""

Sent = tuple[type[logging.Handler], str, dict[str, Any]]
"""A handler: its class, ``stdout``, ``stderr`` or the path of its file, its other attributes."""


def read(place: Place) -> State:
    """In the notebook loggers that differ from a fresh process; on ranks all, because a cell may reset a logger."""
    state: State = {"disable": logging.root.manager.disable}
    if (names := dict(logging._levelToName)) != _LEVELS:
        state["level names"] = {level: name for level, name in names.items() if _LEVELS.get(level) != name}
    naming = [text for text in place.texts if "logg" in text]
    for name, logger in _loggers():
        told, handlers = (logger.level, logger.propagate, logger.disabled), list(_sent(logger, place))
        if (told != _FRESH or logger.handlers or place.rank is not None) and _of_the_notebook(name, naming):
            state[name] = told
            state[f"handlers of {name}"] = handlers
            state |= _staying(name, logger, handlers) if not _is_librarys(name) else {}
    return state


def _loggers() -> Iterator[tuple[str, logging.Logger]]:
    yield _ROOT, logging.root
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger):
            yield name, logger


def _of_the_notebook(name: str, naming: list[str]) -> bool:
    """``naming``: the texts of cells that contain ``logg``."""
    if not _is_librarys(name):
        return True
    return name.partition(".")[0] not in _NEVER and any(name in text for text in naming)


def _is_librarys(name: str) -> bool:
    top = name.partition(".")[0]
    loaded = top in sys.modules and top not in ("__main__", _ROOT)
    return loaded or top in _NEVER or name.startswith(_TORCHS)


def _sent(logger: logging.Logger, place: Place) -> Iterator[Sent]:
    for handler in logger.handlers:
        if where := _target(handler, any_mode=place.rank is not None):
            rest = {key: value for key, value in vars(handler).items() if key not in _OF_THE_PROCESS}
            mode = {"mode": "a"} if isinstance(handler, logging.FileHandler) else {}
            yield type(handler), where, {**rest, **mode, "filters": list(handler.filters)}


def _target(handler: logging.Handler, any_mode: bool = False) -> str:
    """The target of a handler that can travel; empty for other handlers. ``any_mode``: of one of a file, too."""
    if isinstance(handler, logging.FileHandler):
        told = handler.mode.startswith("a") or (any_mode and handler.baseFilename != os.devnull)
        return handler.baseFilename if told else ""
    stream = getattr(handler, "stream", None)
    if not isinstance(handler, logging.StreamHandler) or stream is None:
        return ""
    streams = {"stdout": (sys.stdout, sys.__stdout__), "stderr": (sys.stderr, sys.__stderr__)}
    return next((name for name, own in streams.items() if any(stream is one for one in own)), "")


def _staying(name: str, logger: logging.Logger, handlers: list[Sent]) -> State:
    others = [one for one in logger.handlers if not _target(one) and not isinstance(one, logging.NullHandler)]
    if not others:
        return {}
    kinds = ", ".join(sorted({type(one).__name__ for one in others}))
    return {
        f"other handlers of {name}": Stays(f"{kinds}; only those on stdout and stderr, and files in mode a, go along")
    }


def write(state: State, place: Place) -> None:
    each(state, lambda key, value: _write(key, value, place))


def _write(key: str, value: Any, place: Place) -> None:
    if key == "disable":
        logging.disable(value)
    elif key == "level names":
        for level, name in value.items():
            logging.addLevelName(level, name)
    elif key.startswith("handlers of "):
        _set_handlers(_logger(key.removeprefix("handlers of ")), value, place)
    else:
        logger = _logger(key)
        logger.setLevel(value[0])
        logger.propagate, logger.disabled = value[1:]


def _logger(name: str) -> logging.Logger:
    return logging.root if name == _ROOT else logging.getLogger(name)


def _set_handlers(logger: logging.Logger, sent: list[Sent], place: Place) -> None:
    """Set the handlers. Existing handlers are updated in place, because the notebook may have names for them."""
    there = [handler for handler in logger.handlers if _target(handler)]
    for kind, where, rest in sent:
        if place.rank and where not in ("stdout", "stderr"):
            continue
        alike = [handler for handler in there if type(handler) is kind and _target(handler) == where]
        if alike:
            there.remove(alike[0])
            vars(alike[0]).update(rest)
        else:
            _close_others(logger, where)
            logger.addHandler(_made(kind, where, rest))
    for handler in there:
        logger.removeHandler(handler)


def _close_others(logger: logging.Logger, where: str) -> None:
    """Close handlers that hold the file in another mode: the cell has opened it anew."""
    for handler in list(logger.handlers):
        if not _target(handler) and _target(handler, any_mode=True) == where:
            logger.removeHandler(handler)
            handler.close()


def _made(kind: type[logging.Handler], where: str, rest: dict[str, Any]) -> logging.Handler:
    handler: Any = kind.__new__(kind)
    logging.Handler.__init__(handler)
    handler.stream = getattr(sys, where, None) if where in ("stdout", "stderr") else None  # a file is opened when used
    vars(handler).update(rest)
    return handler  # type: ignore[no-any-return]


def later(state: State) -> Mapping[str, State]:
    found: dict[str, State] = {}
    for key, value in state.items():
        top = key.removeprefix("handlers of ").partition(".")[0]
        if key not in ("disable", "level names") and top != _ROOT:
            found.setdefault(top, {})[key] = value
    return found


def words(state: State) -> str:
    """``root level INFO, train level DEBUG, handlers``."""
    parts = []
    for key, value in state.items():
        if isinstance(value, tuple):
            parts.append(f"{key} {logging.getLevelName(value[0])}")
        elif value:
            parts.append(key)
    return ", ".join(parts)


USUAL = Usual(
    {"disable": 0, _ROOT: (logging.WARNING, True, False)},
    lambda key: [] if key.startswith("handlers of ") else _FRESH,
)

ADAPTER = Adapter("logging", "logging", read, write, USUAL, words, later)
