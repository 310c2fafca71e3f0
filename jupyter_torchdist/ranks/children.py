"""Child processes of a rank with ``spawn`` and ``forkserver``, for example DataLoader workers.

Python pickles classes and functions of ``__main__`` by name, but the child has no such name: the notebook's
``__main__`` is not a file. So they are sent by value and put into the child's ``__main__``. After that they are sent by
name in both directions, so that ``isinstance`` works.
"""

from __future__ import annotations

import io
import operator
import os
import pickle
import sys
from multiprocessing.reduction import ForkingPickler
from types import FunctionType, ModuleType
from typing import Any

from cloudpickle import cloudpickle


class _Names:
    """Represents the namespace of ``__main__`` in a stream."""

    def __reduce__(self) -> Any:
        return main_names, ()


class _Met:
    """The top-level names that a stream carries by value; pickled last, when they are known."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names

    def __reduce__(self) -> Any:
        return dict, (list(self._names.items()),)


class _ByValue(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with functions of ``__main__`` rebuilt in the ``__main__`` of the receiver."""

    def __init__(self, file: io.BytesIO, main: dict[str, Any]) -> None:
        super().__init__(file)
        self.globals_ref[id(main)] = _Names()
        self._main = main
        self.met: dict[str, Any] = {}

    def reducer_override(self, value: Any) -> Any:
        if _is_of_main(value):
            name = value.__qualname__.partition(".")[0]
            if name in self._main:
                self.met.setdefault(name, self._main[name])
        return super().reducer_override(value)


def install(main: ModuleType) -> None:
    """Let this process send classes and functions of ``main`` by value. Forked children do not do this."""
    names = vars(main)

    def reducer_override(pickler: ForkingPickler, value: Any) -> Any:
        if not _is_of_main(value):
            return NotImplemented
        return arrive, (value.__qualname__, by_value(value, names))

    ForkingPickler.reducer_override = reducer_override  # type: ignore[method-assign,assignment]
    os.register_at_fork(after_in_child=uninstall)


def uninstall() -> None:
    """Send classes and functions only by name again."""
    if "reducer_override" in vars(ForkingPickler):
        del ForkingPickler.reducer_override


def by_value(value: Any, names: dict[str, Any]) -> bytes:
    """A stream for ``arrive`` with ``value`` and the values that it needs from the namespace ``names``."""
    file = io.BytesIO()
    pickler = _ByValue(file, names)
    pickler.dump((value, _Met(pickler.met)))
    return file.getvalue()


def arrive(qualname: str, stream: bytes) -> Any:
    """The object ``qualname`` of this process's ``__main__``. If it is missing, it is loaded from ``stream``."""
    try:
        return operator.attrgetter(qualname)(sys.modules["__main__"])
    except AttributeError:
        value, met = pickle.loads(stream)
        for name, item in met.items():
            main_names().setdefault(name, item)
        return value


def main_names() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def _is_of_main(value: Any) -> bool:
    return isinstance(value, (type, FunctionType)) and value.__module__ == "__main__"
