"""The pickler of both directions: cloudpickle's, with our own reducers where the crossing needs more.

A function of the notebook (its globals are the notebook's namespace) travels by value and is rebuilt over the
other side's namespace; the global names it uses travel with it, each once, before anything that could call it.
"""

from __future__ import annotations

import copyreg
import functools
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from typing import IO, Any

from cloudpickle import cloudpickle

from . import codes, rebuild, refusals
from .rebuild import Storage
from .tensors import (
    Storages,
    is_optimizer,
    is_parametrized,
    is_tensor,
    reduce_optimizer,
    reduce_parametrized,
    reduce_storage,
    reduce_tensor,
)

LARGE = 256 << 10
"""Buffers of at least so many bytes travel out of band, each in a file of its own."""

_lru_wrapper = type(functools.lru_cache(lambda: None))


class Enter:
    """Marks where the value of a global name begins in the stream; it is rebuilt as the name."""

    def __init__(self, name: str, user: str) -> None:
        self.name, self.user = name, user


class Leave:
    """Marks where that value ends."""


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Protocol 5 with large buffers out of band. ``main`` is the namespace of the notebook (or of the rank)."""

    def __init__(
        self,
        file: IO[bytes],
        main: dict[str, Any],
        extents: dict[int, tuple[int, int]] | None = None,
        large: int = LARGE,
    ) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        super().__init__(file, protocol=5, buffer_callback=_collector(self.buffers, large))
        self.main = main
        self.storages = Storages(extents)
        self.notes: list[str] = []
        self.labels: dict[str, str] = {}
        self.files: dict[str, None] = {}
        """Source files of the code that travels by value, by the name it has in this process."""
        self.modules: dict[str, str] = {}
        """Modules referred to → what refers to them."""
        self._handlers: dict[type, Callable[[Any], Any] | None] = {}
        self._cells: set[int] = set()

    # What the two directions do differently.

    def globals_of(self, function: types.FunctionType) -> Iterable[tuple[Enter, Any, Leave]]:
        """Globals of a notebook function that have to travel with it."""
        return ()

    def entered(self, name: str, user: str) -> None:
        """The value of a global name begins."""

    def left(self) -> None:
        """The value of a global name has ended."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        try:
            handler = self._handlers[kind]
        except KeyError:
            handler = self._handlers[kind] = self._choose(kind)
        return NotImplemented if handler is None else handler(value)

    def _choose(self, kind: type) -> Callable[[Any], Any] | None:
        fixed = _FIXED.get(kind)
        if fixed is not None:
            return functools.partial(fixed, self)
        for base, handler in _BASES:
            if issubclass(kind, base):
                return functools.partial(handler, self)
        if is_tensor(kind):
            return self._tensor
        if is_optimizer(kind):
            return reduce_optimizer
        if is_parametrized(kind):
            return reduce_parametrized
        if (reason := refusals.reason(kind)) is not None:
            return functools.partial(_refuse, reason)
        if _cannot_be_asked(kind):
            return _by_attributes
        if (numpy := sys.modules.get("numpy")) is not None and issubclass(kind, numpy.ndarray):
            return functools.partial(_array, numpy) if kind in (numpy.ndarray, numpy.memmap) else None
        return None

    def _tensor(self, value: Any) -> Any:
        return reduce_tensor(value, self.storages)

    def _class(self, value: type) -> Any:
        reduced = cloudpickle._class_reduce(value)
        if reduced is NotImplemented:
            self._refer(value)
        if not isinstance(reduced, tuple) or len(reduced) != 6:
            return reduced
        maker, arguments, state = reduced[:3]
        if "__slots__" in vars(value) and maker is cloudpickle._make_skeleton_class and not hasattr(value, "_fields"):
            # cloudpickle sets it afterwards, too late to make slots
            arguments[3]["__slots__"] = state[0].pop("__slots__", ())
        parts = (maker, arguments[:-2], value.__module__, value.__qualname__, codes.class_digest(value))
        return rebuild.class_skeleton, parts, state, None, None, rebuild.set_class

    def _function(self, value: types.FunctionType) -> Any:
        if value.__globals__ is not self.main and cloudpickle._should_pickle_by_reference(value):
            self._refer(value)
            return NotImplemented
        for name in codes.references(value.__code__).imports:
            self.modules.setdefault(name, value.__qualname__)
        state, slots = cloudpickle._function_getstate(value)
        if value.__globals__ is self.main:
            scope: Any = None
            needed = list(self.globals_of(value))
        elif (module := _home(value)) is not None:
            scope, needed = module, []
        else:
            scope = self._function_getnewargs(value)[1]
            needed = [(Enter(name, ""), item, Leave()) for name, item in slots["__globals__"].items()]
        for name in ("__globals__", "__closure__"):
            del slots[name]
        slots.pop("_cloudpickle_submodules")
        cells = value.__closure__ or ()
        state = {
            "submodules": _submodules(value),
            "globals": needed,
            "cells": self._contents(cells),
            "dict": state,
            "attributes": slots,
        }
        parts = (value.__code__, tuple(cells), scope, codes.code_digest(value.__code__))
        return rebuild.function, parts, state, None, None, rebuild.set_function

    def _contents(self, cells: Iterable[types.CellType]) -> list[tuple[types.CellType, Any]]:
        """Contents of cells not yet in the stream; the function itself may be among them, so they come later."""
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
        return cloudpickle._code_reduce(value.replace(co_filename=label) if label else value)

    def _module(self, value: types.ModuleType) -> Any:
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
        if name not in self.modules:
            if _made_by_hand(name) and _made_by_hand(name.partition(".")[0]):
                raise pickle.PicklingError(f"the module {name} exists only in this process")
            self.modules[name] = user

    def _builtin(self, value: Any) -> Any:
        self._refer(value)
        return NotImplemented

    def _enter(self, mark: Enter) -> Any:
        self.entered(mark.name, mark.user)
        return rebuild.same, (mark.name,)

    def _leave(self, mark: Leave) -> Any:
        self.left()
        return rebuild.same, (None,)


def _collector(buffers: list[pickle.PickleBuffer], large: int) -> Callable[[pickle.PickleBuffer], bool]:
    """A buffer callback that holds no reference to the pickler: a cycle would keep the user's data alive."""

    def collect(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < large:
            return True
        buffers.append(buffer)
        return False

    return collect


def _made_by_hand(name: str) -> bool:
    """Whether the loaded module came from no file and no finder: another process cannot import it."""
    module = sys.modules.get(name)
    if module is None or name in ("__main__", "__mp_main__") or name in sys.builtin_module_names:
        return False
    return getattr(module, "__spec__", None) is None and getattr(module, "__file__", None) is None


def _home(function: types.FunctionType) -> types.ModuleType | None:
    """The module whose namespace a function within another function has, where the other side imports that, too."""
    module = sys.modules.get(function.__module__ or "")
    if module is None or vars(module) is not function.__globals__ or _made_by_hand(module.__name__):
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
    return loaded_submodules(used, references.attributes)


def loaded_submodules(values: Iterable[Any], attributes: set[str]) -> list[types.ModuleType]:
    """Modules loaded below the packages among ``values`` whose path is spelt by ``attributes``."""
    packages = [value for value in values if isinstance(value, types.ModuleType) and hasattr(value, "__path__")]
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


def _refuse(reason: str, value: Any) -> Any:
    if value is sys.stdout or value is sys.stderr:
        return getattr, (sys, "stdout" if value is sys.stdout else "stderr")
    raise pickle.PicklingError(reason)


_DEFAULTS = ("__reduce_ex__", "__reduce__", "__new__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")


def _cannot_be_asked(kind: type) -> bool:
    """Whether a stream that pickle itself writes of such an object cannot be read.

    Reading asks the object, which has no attributes yet, for ``__setstate__``; a ``__getattr__`` that looks into an
    attribute for others (tqdm's wrapper of files) asks itself for that one then, without an end.
    """
    if not any("__getattr__" in vars(base) for base in kind.__mro__) or hasattr(kind, "__setstate__"):
        return False
    if any(getattr(kind, name, None) is not getattr(object, name, None) for name in _DEFAULTS):
        return False
    if not kind.__dictoffset__ or any(getattr(base, "__slots__", ()) for base in kind.__mro__):
        return False
    try:
        getattr(object.__new__(kind), "__setstate__", None)
    except Exception:  # noqa: BLE001  # the user's own, which may raise anything
        return True
    return False


def _by_attributes(value: Any) -> Any:
    reading = (copyreg.__newobj__, (type(value),))  # type: ignore[attr-defined]
    return *reading, dict(vars(value)), None, None, rebuild.set_attributes


def _array(numpy: Any, value: Any) -> Any:
    if type(value) is numpy.memmap:
        return _memmap(numpy, value)
    if value.nbytes < LARGE or value.dtype.hasobject or value.flags.c_contiguous or value.flags.f_contiguous:
        return NotImplemented
    return numpy.ascontiguousarray(value).__reduce_ex__(5)


def _memmap(numpy: Any, value: Any) -> Any:
    """A memory-mapped file goes as its path; a view of one whose layout has no such form, as data."""
    path, flags = value.filename, value.flags
    if path is None or not (flags.c_contiguous or flags.f_contiguous) or value._mmap is None:
        return numpy.array(value, subok=False).__reduce_ex__(5)
    start = numpy.frombuffer(value._mmap, numpy.uint8).__array_interface__["data"][0]
    granularity = 1 << 16 if sys.platform == "win32" else __import__("mmap").ALLOCATIONGRANULARITY
    base = value
    while isinstance(base.base, numpy.memmap):
        base = base.base
    offset = base.offset - base.offset % granularity + value.__array_interface__["data"][0] - start
    mode = "r+" if value.mode == "w+" else value.mode
    order = "C" if flags.c_contiguous else "F"
    return rebuild.memmap, (str(path), value.dtype, mode, int(offset), value.shape, order)


def _lru_cache(pickler: Pickler, value: Any) -> Any:
    parameters = value.cache_parameters()
    parts = (value.__wrapped__, parameters["maxsize"], parameters["typed"])
    state = {name: item for name, item in vars(value).items() if name != "cache_parameters"}
    return rebuild.lru_cache, parts, state, None, None, rebuild.set_attributes


def _weak_keys(pickler: Pickler, value: Any) -> Any:
    return type(value), (dict(value),)


def _weak(pickler: Pickler, value: Any) -> Any:
    return rebuild.weak_reference, (value(),)


def _storage(pickler: Pickler, value: Storage) -> Any:
    return reduce_storage(value)


_EXCEPTION_FIELDS = ("errno", "strerror", "filename", "filename2", "name", "path", "obj", "code", "value", "msg",
                     "lineno", "offset", "text", "end_lineno", "end_offset", "print_file_and_line",
                     "encoding", "object", "start", "end", "reason")  # fmt: skip


def _exception(pickler: Pickler, value: BaseException) -> Any:
    """By class, arguments and attributes; a class with a ``__reduce__`` of its own knows better."""
    kind = type(value)
    builtin = next(base for base in kind.__mro__ if not base.__flags__ & (1 << 9))
    fields = {name: getattr(value, name) for name in _EXCEPTION_FIELDS if hasattr(builtin, name)}
    state = {
        "fields": {name: item for name, item in fields.items() if item is not None},
        "dict": dict(vars(value)),
        "cause": value.__cause__,
        "context": value.__context__,
        "suppress": value.__suppress_context__,
    }
    return rebuild.exception, (kind, value.args), state, None, None, rebuild.set_exception


def _named_type(pickler: Pickler, value: Any) -> Any:
    """``typing.NewType`` and the like pickle by name, which the notebook's namespace is too late to give."""
    if getattr(value, "__module__", None) not in (None, "__main__"):
        return NotImplemented
    if hasattr(value, "__supertype__"):
        return type(value), (value.__name__, value.__supertype__)
    return type(value), (value.__name__,)


_FIXED: dict[type, Callable[[Pickler, Any], Any]] = {
    Enter: Pickler._enter,
    Leave: Pickler._leave,
    Storage: _storage,
    types.FunctionType: Pickler._function,
    types.CodeType: Pickler._code,
    types.CellType: Pickler._cell,
    types.BuiltinFunctionType: Pickler._builtin,
    _lru_wrapper: _lru_cache,
    weakref.WeakKeyDictionary: _weak_keys,
    weakref.WeakValueDictionary: _weak_keys,
    weakref.ReferenceType: _weak,
}
_typing = sys.modules["typing"]
for _name in ("NewType", "ParamSpec", "TypeVarTuple"):
    if isinstance(_kind := getattr(_typing, _name, None), type):
        _FIXED[_kind] = _named_type

_BASES: tuple[tuple[type, Callable[[Pickler, Any], Any]], ...] = (
    (type, Pickler._class),
    (types.ModuleType, Pickler._module),
    (BaseException, _exception),
)

__all__ = ["LARGE", "Enter", "Leave", "Pickler", "loaded_submodules"]
