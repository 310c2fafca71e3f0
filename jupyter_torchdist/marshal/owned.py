"""Objects that belong to modules: ``os.environ``, ``matplotlib.rcParams``, a dictionary of a library.

Where a name or a container refers to such an object, the other process must find its own module's object there.
"""

from __future__ import annotations

import builtins
import enum
import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from . import byvalue
from .attributes import CONTAINERS

_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_NO_LIBRARY = ("builtins", "__main__", "__mp_main__")
_PICKLED_BY_NAME = frozenset({"logging", "re", "typing", "typing_extensions", "_thread", "threading", "functools"})
"""Modules whose objects find themselves in another process, or are no data."""


@dataclass(frozen=True)
class Owned:
    """The attribute ``name`` of the module, which is ``value`` here."""

    module: str
    name: str
    value: Any

    @property
    def content(self) -> Any:
        """A copy of a container's items. None for other objects, and for those that Python itself uses."""
        python = self.module.partition(".")[0] in sys.stdlib_module_names
        return None if python or type(self.value) not in CONTAINERS else self.value.copy()


BUILTINS = Owned("builtins", "__dict__", vars(builtins))
"""``exec(code, names)`` puts this dictionary into ``names``."""


def of_modules(modules: Iterable[types.ModuleType], names: set[str] | None = None) -> dict[int, Owned]:
    """The modules' objects by ``id``; ``names``: only attributes with these names."""
    found: dict[int, Owned] = {}
    for module in modules:
        home = vars(module).get("__name__")
        if sys.modules.get(str(home)) is not module or byvalue.travels(module) or home in _NO_LIBRARY:
            continue
        for name, value in list(vars(module).items()):
            if (names is None or name in names) and not name.startswith("__") and _is_object(value):
                found.setdefault(id(value), Owned(str(home), name, value))
    return found


def _is_object(value: Any) -> bool:
    """Whether the value is data with an identity that matters."""
    kind = type(value)
    if kind in CONTAINERS:
        return True
    return (
        bool(kind.__dictoffset__)
        and not issubclass(kind, (*_CODE, enum.Enum))
        and kind.__module__ not in _PICKLED_BY_NAME
    )
