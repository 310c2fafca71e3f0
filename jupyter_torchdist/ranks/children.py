"""Child processes of a rank under ``spawn`` and ``forkserver``, such as DataLoader workers.

They pickle classes and functions of ``__main__`` by name, and in the child there is no such name: the notebook's
``__main__`` is no file. So they travel by value and are put into the child's ``__main__``; from there
everything goes by name again, in both directions, and ``isinstance`` holds.
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
    """Stands for the namespace of ``__main__`` in a stream."""

    def __reduce__(self) -> Any:
        return main_names, ()


class _Met:
    """The top-level names a stream carried by value; pickled last, when they are known."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names

    def __reduce__(self) -> Any:
        return dict, (list(self._names.items()),)


class _ByValue(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with functions of ``__main__`` rebuilt over the other side's ``__main__``."""

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
    """From here on this process sends classes and functions of ``main`` by value. Its forked children need not."""
    names = vars(main)

    def reducer_override(pickler: ForkingPickler, value: Any) -> Any:
        if not _is_of_main(value):
            return NotImplemented
        return arrive, (value.__qualname__, by_value(value, names))

    ForkingPickler.reducer_override = reducer_override  # type: ignore[method-assign,assignment]
    os.register_at_fork(after_in_child=uninstall)


def uninstall() -> None:
    """Back to names alone."""
    if "reducer_override" in vars(ForkingPickler):
        del ForkingPickler.reducer_override


def by_value(value: Any, names: dict[str, Any]) -> bytes:
    """``value`` and what it needs of the namespace ``names`` as a stream for ``arrive``."""
    file = io.BytesIO()
    pickler = _ByValue(file, names)
    pickler.dump((value, _Met(pickler.met)))
    return file.getvalue()


def arrive(qualname: str, stream: bytes) -> Any:
    """What this process's ``__main__`` calls ``qualname``; unless it has it, the one in ``stream``, put there."""
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
