"""Everything a user can see of a notebook's names, as text that is equal where the notebooks are equal.

Runs in the kernel. Objects are numbered as they are met, so an alias and an equal copy differ.
"""

from __future__ import annotations

import os
import re
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+|\bat [0-9A-F]{8,}|\b\d{12,}\b")
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(...), range, slice)
_OF_PYTHON = frozenset({
    "__module__", "__dict__", "__weakref__", "_abc_impl", "__firstlineno__", "__static_attributes__", "__slotnames__",
    "__annotate_func__", "__annotations_cache__", "__annotate__",
})  # fmt: skip
_DEPTH = 40
_PATH: list[str] = []
"""``sys.path`` before the first case."""
_PLACES: set[str] = set()
"""Where cases have worked."""


def begin(directory: str) -> None:
    """Work in ``directory``; local modules of earlier cases are forgotten."""
    import importlib

    _PLACES.add(str(Path(directory).parent))
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(tuple(_PLACES)):
            del sys.modules[name]
    _PATH[:] = _PATH or sys.path
    sys.path[:] = _PATH
    os.makedirs(directory, exist_ok=True)
    os.chdir(directory)
    importlib.invalidate_caches()


def seen(names: dict[str, Any], hidden: Iterable[str]) -> dict[str, str]:
    """The text of each name that a user has defined, and of each file in the working directory."""
    walk = _Walk()
    own = sorted(name for name in names if name not in set(hidden) and not re.match(r"_|In$|Out$|exit$|quit$", name))
    found = {name: walk.text(names[name]) for name in own}
    found["sys.path"] = str([entry for entry in sys.path if entry not in _PATH])
    for file in sorted(Path().rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            found[f"file {file}"] = str(file.stat().st_size) if file.suffix in (".pt", ".pth") else repr(_read(file))
    return found


def _read(file: Path) -> bytes:
    return file.read_bytes()[:2000]


class _Walk:
    """One walk over all names."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []

    def text(self, value: Any, depth: int = _DEPTH) -> str:
        kind = type(value)
        if kind in _ATOMS:
            return repr(value)
        if depth == 0:
            return "…"
        if id(value) in self._numbers:
            return f"#{self._numbers[id(value)]}"
        if (name := _by_name(value)) is not None:
            return name
        self._kept.append(value)
        if kind is not tuple:  # a tuple's identity is nobody's concern
            self._numbers[id(value)] = len(self._numbers)
        return f"#{len(self._numbers) - 1}={self._content(value, depth - 1)}"

    def _content(self, value: Any, depth: int) -> str:
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(value, type):
            if (meta := type(value).__module__).partition(".")[0] not in (
                "builtins",
                "abc",
                "enum",
                "__main__",
                "typing",
            ):
                return f"class {value.__qualname__} of {meta}"
            bases = [self.text(base, depth) for base in value.__bases__]
            return f"class {value.__qualname__}({bases}) {self._names(_class_names(value), depth)}"
        if isinstance(value, types.FunctionType):
            return f"function {value.__qualname__} {self._names(_function_names(value), depth)}"
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, types.CellType):
            return f"cell {self._cell(value, depth)}"
        parts = [name, *self._items(value, depth)]
        return f"<{' '.join([*parts, self._attributes(value, depth)])}>"

    def _cell(self, value: types.CellType, depth: int) -> str:
        try:
            return self.text(value.cell_contents, depth)
        except ValueError:
            return "empty"

    def _items(self, value: Any, depth: int) -> list[str]:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(value, torch.Tensor):
            facts = (value.dtype, tuple(value.shape), value.requires_grad, value.is_leaf)
            grad = self.text(value.grad, depth) if value.is_leaf else ""
            return [str(facts), str(value.detach().tolist()), grad]
        if numpy is not None and isinstance(value, numpy.ndarray):
            return [str((value.dtype, value.shape, value.flags.writeable)), str(value.tolist())]
        if isinstance(value, (dict, WeakKeyDictionary)):
            items = OrderedDict.items(value) if isinstance(value, OrderedDict) else dict(value).items()
            return [f"{self.text(key, depth)}: {self.text(item, depth)}" for key, item in items]
        if (pandas := sys.modules.get("pandas")) is not None and isinstance(value, (pandas.DataFrame, pandas.Series)):
            return [repr(value), str(value.attrs)]
        if isinstance(value, (list, tuple, deque)):
            return [self.text(item, depth) for item in value]
        if isinstance(value, (set, frozenset)):
            return sorted(_ADDRESS.sub("", repr(item)) for item in value)
        if isinstance(value, (int, float, str, bytes, bytearray)):
            return [repr(value)]
        if isinstance(value, BaseException):
            return [self.text(value.args, depth)]
        if isinstance(value, types.MethodType):
            return [self.text(value.__self__, depth), value.__func__.__qualname__]
        if not hasattr(value, "__dict__") and not _slots(type(value)):
            return [_ADDRESS.sub("", repr(value))]
        return []

    def _attributes(self, value: Any, depth: int) -> str:
        try:
            own = object.__getattribute__(value, "__dict__")
        except AttributeError:
            own = {}
        found = {"its own __dict__": True} if own is value else dict(own)
        module = type(value).__module__
        if module.partition(".")[0] in ("pandas", "weakref"):
            return ""
        if (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.nn.Module):
            kept = ("_parameters", "_buffers", "_modules")
            found = {name: item for name, item in found.items() if name in kept or not name.startswith("_")}
        for slot in _slots(type(value)):
            if hasattr(value, slot):
                found[slot] = getattr(value, slot)
        return self._names(found, depth)

    def _names(self, names: dict[str, Any], depth: int) -> str:
        return " ".join(f".{name}={self.text(names[name], depth)}" for name in sorted(names, key=str))


def _by_name(value: Any) -> str | None:
    """The text for code that is imported, not defined in the notebook."""
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        module, name = value.__module__, getattr(value, "__qualname__", "")
        if module != "__main__" and module in sys.modules and "<locals>" not in name:
            return f"{module}.{name}"
    return None


def _class_names(value: type) -> dict[str, Any]:
    slots = set(_slots(value))
    return {name: item for name, item in vars(value).items() if name not in _OF_PYTHON and name not in slots}


def _function_names(value: types.FunctionType) -> dict[str, Any]:
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
    named = {"__defaults__": value.__defaults__, "__kwdefaults__": value.__kwdefaults__, "__doc__": value.__doc__}
    return {**named, **vars(value), **{f"({name})": cell for name, cell in cells}}


def _slots(kind: type) -> list[str]:
    found = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return [slot for slot in found if slot not in ("__dict__", "__weakref__")]
