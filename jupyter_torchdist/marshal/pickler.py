"""The pickler for both directions: a subclass of cloudpickle's pickler with additional reducers.

A function of the notebook (its globals are the notebook's namespace) travels by value. Its globals become the
namespace of the other process. The global names that it uses travel with it, each once, before it can be called.
"""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Callable, Iterable
from typing import IO, Any

from cloudpickle import cloudpickle

from . import byvalue, classes, codes, generated, portable, rebuild, reducers
from .owned import BUILTINS, Owned
from .reducers import LARGE, Handler
from .tensors import Storages, reduce_tensor


class Enter:
    """Marks where the value of a global name begins in the stream; the mark is rebuilt as the name."""

    def __init__(self, name: str, user: str) -> None:
        self.name, self.user = name, user


class Leave:
    """Marks where the value of a global name ends."""


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Protocol 5 with large buffers out of band. ``main`` is the namespace of the notebook (or of the rank)."""

    def __init__(
        self,
        file: IO[bytes],
        main: dict[str, Any],
        extents: dict[int, tuple[int, int]] | None = None,
        large: int = LARGE,
        portable: bool = False,
    ) -> None:
        """``portable``: for another release of Python."""
        self.buffers: list[pickle.PickleBuffer] = []
        super().__init__(file, protocol=5, buffer_callback=_collector(self.buffers, large))
        self.main = main
        self.portable = portable
        self.storages = Storages(extents)
        self.notes: list[str] = []
        self.labels: dict[str, str] = {}
        self.files: dict[str, None] = {}
        """Source files of the code that travels by value, by their names in this process."""
        self.modules: dict[str, str] = {}
        """Modules in the stream → the object that refers to them first."""
        self.referred: set[str] = set()
        """Those without which the stream cannot be loaded. Functions import the others when they run."""
        self.scopes: dict[int, rebuild.Scope] = {}
        """Globals that are neither the notebook's nor a module's, by the ``id`` of the dictionary."""
        self._handlers: dict[type, Handler | None] = {}
        self._cells: set[int] = set()
        self._namespaces = byvalue.Namespaces(main)

    def begin(self, objects: Iterable[Owned] = ()) -> None:
        """Write the namespaces and the objects of modules as references; to be called before all else.

        Stand-ins are written, and the memo then has the objects in their places: references to dictionaries, too, are
        written as references.
        """
        standing = [Owned("__main__", "", self.main), BUILTINS, *objects]
        self.dump({"": standing})
        memo: dict[int, tuple[int, Any]] = self.memo.copy()
        for one in standing:
            memo[id(one.value)] = (memo.pop(id(one))[0], one.value)
        setattr(self, "memo", memo)  # noqa: B010  # of the C pickler

    # Methods that the two directions override.

    def globals_of(self, function: types.FunctionType) -> Iterable[tuple[Enter, Any, Leave]]:
        """Globals of a notebook function that must travel with it."""
        return ()

    def entered(self, name: str, user: str) -> None:
        """The value of a global name begins."""

    def left(self) -> None:
        """The value of a global name has ended."""

    def by_value(self, code: Any) -> None:
        """A class or function travels by value."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        try:
            handler = self._handlers[kind]
        except KeyError:
            handler = self._handlers[kind] = self._choose(kind)
        return NotImplemented if handler is None else handler(self, value)

    def _choose(self, kind: type) -> Handler | None:
        if (own := _OWN.get(kind)) is not None:
            return own
        if issubclass(kind, type):
            return Pickler._class
        return Pickler._module if issubclass(kind, types.ModuleType) else reducers.for_type(kind)

    def tensor(self, value: Any) -> Any:
        return reduce_tensor(value, self.storages)

    def _class(self, value: type) -> Any:
        if not byvalue.carries(value):
            if (reduced := cloudpickle._class_reduce(value)) is NotImplemented:
                self._refer(value)
                if self.portable and (place := _public_place(value)):
                    return rebuild.original, place
            return reduced
        self.by_value(value)
        parts = (*classes.parts_of(value), value.__qualname__, codes.class_digest(value))
        state = classes.attributes_of(value), classes.members_of(value)
        if not self.portable:
            return rebuild.class_skeleton, parts, state, None, None, rebuild.set_class
        own, again = generated.without_generated(value, state[0])
        return rebuild.class_skeleton, parts, ((own, state[1]), again), None, None, generated.set_class

    def _function(self, value: types.FunctionType) -> Any:
        module = None if value.__globals__ is self.main else self._namespaces.of(value)
        if value.__globals__ is not self.main and module is None and cloudpickle._should_pickle_by_reference(value):
            self._refer(value)
            return NotImplemented
        self.by_value(value)
        for name in codes.references(value.__code__).imports:
            self.modules.setdefault(name, value.__qualname__)
        state, slots = cloudpickle._function_getstate(value)
        if value.__globals__ is self.main:
            scope: Any = None
            needed = list(self.globals_of(value))
        elif (home := module or _home(value)) is not None:
            scope, needed = home, []
        else:
            scope = self.scopes.setdefault(id(value.__globals__), rebuild.Scope(value.__globals__))
            needed = [(Enter(name, ""), item, Leave()) for name, item in slots["__globals__"].items()]
        for name in ("__globals__", "__closure__"):
            del slots[name]
        slots.pop("_cloudpickle_submodules")
        cells = value.__closure__ or ()
        state = {
            "submodules": _submodules(value),
            "scope": scope if isinstance(scope, rebuild.Scope) else None,
            "globals": needed,
            "cells": self._contents(cells),
            "dict": state,
            "attributes": slots,
        }
        parts = (value.__code__, tuple(cells), scope, codes.code_digest(value.__code__))
        return rebuild.function, parts, state, None, None, rebuild.set_function

    def _contents(self, cells: Iterable[types.CellType]) -> list[tuple[types.CellType, Any]]:
        """Contents of new cells. They are written after the function, which may be the content of a cell itself."""
        contents = []
        for cell in cells:
            if id(cell) in self._cells:
                continue
            self._cells.add(id(cell))
            try:
                contents.append((cell, cell.cell_contents))
            except ValueError:  # an empty cell
                continue
        return contents

    def _cell(self, value: types.CellType) -> Any:
        if id(value) in self._cells:
            return rebuild.cell, ()
        self._cells.add(id(value))
        try:
            return rebuild.cell, (), value.cell_contents, None, None, rebuild.set_cell
        except ValueError:
            return rebuild.cell, ()

    def _code(self, value: types.CodeType) -> Any:
        self.files[value.co_filename] = None
        label = self.labels.get(value.co_filename)
        if self.portable:
            return portable.reduce(value, label or value.co_filename)
        return cloudpickle._code_reduce(value.replace(co_filename=label) if label else value)

    def _owned(self, value: Owned) -> Any:
        if value.value is self.main:
            return rebuild.namespace, ()
        if value is BUILTINS:
            return rebuild.original, (value.module, value.name)
        self._refer_module(value.module, f"{value.module}.{value.name}")
        return rebuild.owned, (value.module, value.name, value.content)

    def _scope(self, value: rebuild.Scope) -> Any:
        names = {name: item for name, item in value.names.items() if name in _OF_SCOPES}
        return rebuild.scope, (names,)

    def _module(self, value: types.ModuleType) -> Any:
        if byvalue.travels(value):
            self._namespaces.add(value)
            state = {name: item for name, item in vars(value).items() if name != "__builtins__"}
            name = str(state.get("__name__"))
            return rebuild.made_module, (name, byvalue.exists_only_here(name)), state, None, None, rebuild.set_module
        reduced = cloudpickle._module_reduce(value)
        if reduced[0] is not cloudpickle.subimport:
            return reduced
        self._refer_module(value.__name__, f"module {value.__name__}")
        return rebuild.module, (value.__name__,)

    def _refer(self, value: Any) -> None:
        name = getattr(value, "__module__", None)
        if isinstance(name, str):
            self._refer_module(name, getattr(value, "__qualname__", name))

    def _refer_module(self, name: str, user: str) -> None:
        self.referred.add(name)
        if name not in self.modules:
            if byvalue.exists_only_here(name):
                raise pickle.PicklingError(f"the module {name} exists only in this process")
            self.modules[name] = user

    def _builtin(self, value: Any) -> Any:
        self._refer(value)
        module, name = getattr(value, "__module__", None), value.__name__
        if isinstance(module, str) and getattr(sys.modules.get(module), name, value) is not value:
            return rebuild.original, (module, name)  # a cell has replaced the module's attribute
        return NotImplemented

    def _enter(self, mark: Enter) -> Any:
        self.entered(mark.name, mark.user)
        return rebuild.same, (mark.name,)

    def _leave(self, mark: Leave) -> Any:
        self.left()
        return rebuild.same, (None,)


def _collector(buffers: list[pickle.PickleBuffer], large: int) -> Callable[[pickle.PickleBuffer], bool]:
    """A buffer callback without a reference to the pickler: a cycle would keep the user's data alive."""

    def collect(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < large:
            return True
        buffers.append(buffer)
        return False

    return collect


def _public_place(value: type) -> tuple[str, str] | None:
    """Module and name of a class that its own module is private for: 3.13 alone has ``pathlib._local``."""
    parts = value.__module__.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:count]))
        if parts[count].startswith("_") and getattr(module, value.__qualname__, None) is value:
            return ".".join(parts[:count]), value.__qualname__
    return None


def _home(function: types.FunctionType) -> types.ModuleType | None:
    """The module whose namespace is the globals of a nested function, if the other process can import it.

    ``__module__`` does not tell: ``functools.wraps`` sets it to the module of another function.
    """
    module = sys.modules.get(str(function.__globals__.get("__name__")))
    if module is None or vars(module) is not function.__globals__:
        return None
    return module if cloudpickle._should_pickle_by_reference(module) else None


def _submodules(function: types.FunctionType) -> list[types.ModuleType]:
    """Loaded submodules that the function reaches as attributes of a package (``torch.nn.functional``)."""
    references = codes.references(function.__code__)
    scope = function.__globals__
    used: list[Any] = [scope[name] for name in references.loads if name in scope]
    for cell in function.__closure__ or ():
        try:
            used.append(cell.cell_contents)
        except ValueError:
            continue
    return [*loaded_submodules(used, references.attributes), *byvalue.imported(references.imports)]


def loaded_submodules(values: Iterable[Any], attributes: set[str]) -> list[types.ModuleType]:
    """Loaded submodules of the packages in ``values``, if ``attributes`` contains each name on their path."""
    packages = [value for value in values if issubclass(type(value), types.ModuleType) and hasattr(value, "__path__")]
    found: dict[str, types.ModuleType] = {}
    while packages:
        package = packages.pop()
        for attribute in attributes & vars(package).keys():
            name = f"{package.__name__}.{attribute}"
            loaded = sys.modules.get(name)
            if isinstance(loaded, types.ModuleType) and name not in found:
                found[name] = loaded
                packages.append(loaded)
    return [found[name] for name in sorted(found)]


_OF_SCOPES = ("__name__", "__package__", "__path__", "__file__")

_OWN: dict[type, Handler] = {
    Enter: Pickler._enter,
    Leave: Pickler._leave,
    types.FunctionType: Pickler._function,
    Owned: Pickler._owned,
    rebuild.Scope: Pickler._scope,
    types.CodeType: Pickler._code,
    types.CellType: Pickler._cell,
    types.BuiltinFunctionType: Pickler._builtin,
}

__all__ = ["LARGE", "Enter", "Leave", "Pickler", "loaded_submodules"]
