"""Modules that another process cannot import: they travel by value, each as one namespace.

They were loaded from a path without an entry in ``sys.modules``, or made by hand (``types.ModuleType``).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from typing import Any

from cloudpickle import cloudpickle


def exists_only_here(name: str) -> bool:
    """Whether no other process can import the loaded module ``name``."""
    if "." in name and name in sys.modules and name.rpartition(".")[0] not in sys.modules:
        return True
    return _made_by_hand(name) and _made_by_hand(name.partition(".")[0])


def _made_by_hand(name: str) -> bool:
    """Whether the loaded module has neither a file nor a spec."""
    module = sys.modules.get(name)
    if module is None or name in ("__main__", "__mp_main__") or name in sys.builtin_module_names:
        return False
    return getattr(module, "__spec__", None) is None and getattr(module, "__file__", None) is None


def carries(code: Any) -> bool:
    """Whether the class or function travels by value: the other process cannot import it."""
    module = code.__module__
    if module == "builtins":
        return False
    return module == "__main__" or exists_only_here(str(module)) or not cloudpickle._should_pickle_by_reference(code)


def travels(value: Any) -> bool:
    """Whether the object is a module that travels by value."""
    if type(value) is not types.ModuleType:  # a lazy module pickles itself
        return False
    name = vars(value).get("__name__")
    if not isinstance(name, str):
        return True
    return name != "__main__" and (sys.modules.get(name) is not value or exists_only_here(name))


class Namespaces:
    """The modules by value whose functions may be pickled: modules in the notebook's names or already written."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._known: dict[int, types.ModuleType] | None = None

    def add(self, module: types.ModuleType) -> None:
        self._all()[id(vars(module))] = module

    def of(self, function: types.FunctionType) -> types.ModuleType | None:
        """The module by value whose namespace is the function's globals."""
        scope = function.__globals__
        module: Any = sys.modules.get(str(scope.get("__name__")))
        if module is not None and getattr(module, "__dict__", None) is scope:
            return module if travels(module) else None
        return self._all().get(id(scope))

    def _all(self) -> dict[int, types.ModuleType]:
        if self._known is None:
            self._known = {id(vars(module)): module for module in _modules(self._names.values())}
        return self._known


def _modules(values: Iterable[Any]) -> Iterable[types.ModuleType]:
    return [value for value in list(values) if travels(value)]


def imported(names: Iterable[str]) -> list[types.ModuleType]:
    """The imported modules that exist only here: on a rank they must exist before the import runs."""
    return [sys.modules[name] for name in names if travels(sys.modules.get(name))]
