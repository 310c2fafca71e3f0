"""Writes a rank's exception to a file and reads it back with its own class, without running ``__init__`` again."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..protocol.disk import open_plain
from ..protocol.errors import HINT, RankFailed, TorchDistError
from ..protocol.events import ErrorRecord
from ..protocol.paths import JobPaths
from . import rebuild
from .bundle import Loaded
from .results import Reader, ResultPickler, made_once, memo_of_job

_DEPTH = 20


class _Stripping(ResultPickler):
    """Writes the ``repr`` of exception arguments and attributes that cannot be pickled."""

    def __init__(self, file: io.BytesIO, loaded: Loaded | None) -> None:
        super().__init__(file, loaded, large=sys.maxsize)
        self._loaded = loaded

    def reducer_override(self, value: Any) -> Any:
        reduced = super().reducer_override(value)
        if not isinstance(value, BaseException):
            return reduced
        build, (kind, arguments), state, *rest = reduced
        state["dict"] = {name: self._portable(item) for name, item in state["dict"].items()}
        state["fields"] = {name: self._portable(item) for name, item in state["fields"].items()}
        return build, (kind, tuple(map(self._portable, arguments))), state, *rest

    def _portable(self, value: Any) -> Any:
        try:
            ResultPickler(io.BytesIO(), self._loaded, large=sys.maxsize).dump(value)
        except Exception:  # noqa: BLE001  # the user's own reducers run here and may raise anything
            return _text(value, repr)
        return value


def dump_exception(exc: BaseException, loaded: Loaded | None, path: Path) -> None:
    """Write the exception with its causes, published by rename. Parts that cannot be pickled become their ``repr``.

    The file has a plain description of the chain, then the exception itself if it can be pickled.
    Raises ``OSError`` when the file cannot be written.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    content = pickle.dumps(_describe(exc, _DEPTH)) + _pickled(exc, loaded)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(aside, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
        file.write(content)
    os.rename(aside, path)


def _pickled(exc: BaseException, loaded: Loaded | None) -> bytes:
    whole = io.BytesIO()
    try:
        ResultPickler(whole, loaded, large=sys.maxsize).dump(exc)
        return whole.getvalue()
    except Exception:  # noqa: BLE001  # the user's own reducers run here and may raise anything
        stripped = io.BytesIO()
    try:
        _Stripping(stripped, loaded).dump(exc)
        return stripped.getvalue()
    except Exception:  # noqa: BLE001  # as above: the description must be enough
        return b""


def _describe(exc: BaseException | None, depth: int) -> dict[str, Any] | None:
    """The exception and its causes as plain data."""
    if exc is None or depth == 0:
        return None
    return {
        "type": type(exc).__qualname__,
        "module": type(exc).__module__,
        "bases": [(kind.__module__, kind.__qualname__) for kind in type(exc).__mro__[1:]],
        "text": _text(exc, str),
        "notes": [str(note) for note in getattr(exc, "__notes__", ())],
        "cause": _describe(exc.__cause__, depth - 1),
        "context": _describe(exc.__context__, depth - 1),
        "suppress": exc.__suppress_context__,
    }


def _text(value: Any, form: Any) -> str:
    try:
        return str(form(value))
    except Exception:  # noqa: BLE001  # the user's own __str__ or __repr__ may raise anything
        return f"<{type(value).__qualname__}>"


def load_exception(
    path: Path, memo: Mapping[int, Any] | None, main_dict: dict[str, Any], record: ErrorRecord
) -> BaseException:
    """The exception as an ``Exception`` to raise in the notebook; never raises.

    If it cannot be rebuilt, its class is a new subclass of the nearest importable base, with the same name, text,
    notes and cause. ``SystemExit`` and similar exceptions would end the kernel; they become ``RankFailed``.
    """
    description: Any = None
    found: Any = None
    try:
        with open_plain(path) as file:
            description = pickle.load(file)
            known = _LazyMemo(path, main_dict) if memo is None else memo
            with made_once(JobPaths(path.parent.parent).job, main_dict):
                found = Reader(file, known, main_dict).load()
    except Exception:  # noqa: BLE001  # rebuilding runs the user's own code; then the description is used
        found = None
    if not isinstance(found, BaseException):
        found = _synthesise(description or _from_record(record), main_dict)
    if isinstance(found, Exception):
        return found
    return _carry(found, record)


class _LazyMemo(dict[int, Any]):
    """Reads the job's bundle only when an exception refers to a captured object."""

    def __init__(self, path: Path, main_dict: dict[str, Any]) -> None:
        super().__init__()
        self._directory, self._main = JobPaths(path.parent.parent), main_dict
        self._read = False

    def __contains__(self, place: object) -> bool:
        if not self._read:
            self._read = True
            self.update(memo_of_job(self._directory, self._main))
        return super().__contains__(place)


def _from_record(record: ErrorRecord) -> dict[str, Any]:
    return {"type": record.type, "module": record.module, "bases": [], "text": record.message, "notes": []}


def _synthesise(description: Mapping[str, Any], main_dict: dict[str, Any]) -> BaseException:
    """An exception of a new class with the name, text, notes and causes in ``description``."""
    own = _importable(description["module"], description["type"], main_dict)
    bases = (_importable(module, name, main_dict) for module, name in description["bases"])
    base: Any = own or next((found for found in bases if found), Exception)
    text = description["text"]
    attributes = {"__module__": description["module"], "__str__": lambda self: text, "__doc__": base.__doc__}
    try:
        made = rebuild.exception(type(description["type"].rpartition(".")[2], (base,), attributes), (text,))
    except Exception:  # noqa: BLE001  # a base with a metaclass or __init_subclass__ of its own may refuse
        made = rebuild.exception(type(description["type"].rpartition(".")[2], (Exception,), attributes), (text,))
    if issubclass(base, TorchDistError):
        message, _, made.__dict__["hint"] = text.partition(HINT)
        made.args = (message,)
    if description["notes"]:
        made.__dict__["__notes__"] = list(description["notes"])
    for link in ("cause", "context"):
        if description.get(link):
            setattr(made, f"__{link}__", _synthesise(description[link], main_dict))
    made.__suppress_context__ = bool(description.get("suppress"))
    return made


def _importable(module: str, name: str, main_dict: dict[str, Any]) -> type[BaseException] | None:
    try:
        found: Any = main_dict if module == "__main__" else vars(importlib.import_module(module))
        found = found.get(name.split(".")[0])
        for part in name.split(".")[1:]:
            found = getattr(found, part)
    except Exception:  # noqa: BLE001  # importing runs foreign code, which may raise anything
        return None
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _carry(found: BaseException, record: ErrorRecord) -> RankFailed:
    """A ``RankFailed`` in place of an exception that would end or interrupt the kernel silently."""
    words = {
        "SystemExit": "the code called sys.exit()",
        "KeyboardInterrupt": "the code raised it itself",
    }
    text = _text(found, str)
    title = f"{type(found).__name__}: {text}" if text else type(found).__name__
    what = next((words[kind.__name__] for kind in type(found).__mro__ if kind.__name__ in words), "")
    carrier = RankFailed(title, what or "the rank raised an object that is not an Exception")
    if record.text:
        carrier.__dict__["__notes__"] = list(getattr(found, "__notes__", ()))
    return carrier
