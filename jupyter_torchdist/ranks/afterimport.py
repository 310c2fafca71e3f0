"""Changes a module right after its import, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Change = Callable[[ModuleType], None]


def after_import(changes: dict[str, Change]) -> None:
    """Call each change with the module of its name: now if the module is imported, else right after its import."""
    later = {}
    for name, change in changes.items():
        if (module := sys.modules.get(name)) is not None:
            change(module)
        else:
            later[name] = change
    if later:
        sys.meta_path.insert(0, _Finder(later))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the awaited modules through the other finders and wraps their loaders."""

    def __init__(self, changes: dict[str, Change]) -> None:
        self._changes = changes

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = self._changes.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, change)
        return spec


class _Loader(importlib.abc.Loader):
    """Runs the module's own loader, and then the change."""

    def __init__(self, loader: importlib.abc.Loader, change: Change) -> None:
        self._loader = loader
        self._change = change

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def __getattr__(self, name: str) -> Any:
        """Forward other requests during the import: source, data, resources."""
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._change(module)
