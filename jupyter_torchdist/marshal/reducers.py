"""Reducers for types that pickle cannot handle by itself. The reducer is chosen once for each type."""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import pickle
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from . import byvalue, codes, library_objects, rebuild, refusals
from .rebuild import Storage
from .tensors import is_optimizer, is_parametrized, is_tensor, reduce_optimizer, reduce_parametrized, reduce_storage

LARGE = 256 << 10
"""Buffers of at least this many bytes travel out of band, each in a file of its own."""


class Reducing(Protocol):
    """The pickler that calls a reducer."""

    def tensor(self, value: Any) -> Any: ...


Handler = Callable[[Any, Any], Any]
"""Reduces one object, as ``reducer_override`` does."""

_lru_wrapper = type(functools.lru_cache(lambda: None))


def for_type(kind: type) -> Handler | None:
    """The reducer for objects of the type, or None for pickle's own.

    It is not bound to a pickler: a cycle would keep the user's data alive.
    """
    if (fixed := _FIXED.get(kind)) is not None:
        return fixed
    if issubclass(kind, BaseException):
        return _exception
    if is_tensor(kind):
        return _tensor
    if is_optimizer(kind):
        return _optimizer
    if is_parametrized(kind):
        return _parametrized
    if kind is getattr(sys.modules.get("torch.library"), "CustomOpDef", None):
        return _operator
    if library_objects.concerns(kind):
        return _library_object
    if refusals.reason(kind) is not None:
        return _refuse
    if (proxy := getattr(sys.modules.get("multiprocessing.managers"), "BaseProxy", None)) and issubclass(kind, proxy):
        return _proxy
    if issubclass(kind, enum.Enum) and byvalue.carries(kind):
        return _enum_member
    if issubclass(kind, functools.cached_property):
        return _cached_property
    if _cannot_be_asked(kind):
        return _by_attributes
    if _replaces_its_dictionary(kind):
        return _sharing
    if (numpy := sys.modules.get("numpy")) is not None and issubclass(kind, numpy.ndarray):
        return {numpy.ndarray: _array, numpy.memmap: _memmap}.get(kind)
    return None


def _library_object(pickler: Reducing, value: Any) -> Any:
    if (reduced := library_objects.reduce(value)) is not None:
        return reduced
    return NotImplemented if refusals.reason(type(value)) is None else _refuse(pickler, value)


def _refuse(pickler: Reducing, value: Any) -> Any:
    if value is sys.stdout or value is sys.stderr:
        return getattr, (sys, "stdout" if value is sys.stdout else "stderr")
    raise pickle.PicklingError(refusals.reason(type(value)))


_ASKED = ("__reduce_ex__", "__reduce__", "__getstate__")
_DEFAULTS = ("__reduce_ex__", "__reduce__", "__new__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")


def _cannot_be_asked(kind: type) -> bool:
    """Whether unpickling such an object would fail with pickle's own reducer.

    Unpickling reads ``__setstate__`` of an object without attributes. If the class's ``__getattr__`` reads another
    attribute of the object (as in tqdm's wrapper of files), it then calls itself endlessly.
    """
    if not any("__getattr__" in vars(base) for base in kind.__mro__) or hasattr(kind, "__setstate__"):
        return False
    if any(getattr(kind, name, None) is not getattr(object, name, None) for name in _DEFAULTS):
        return False
    if not kind.__dictoffset__ or any(getattr(base, "__slots__", ()) for base in kind.__mro__):
        return False
    try:
        getattr(object.__new__(kind), "__setstate__", None)
    except Exception:  # noqa: BLE001  # the user's own __getattr__ may raise anything
        return True
    return False


def _by_attributes(pickler: Reducing, value: Any) -> Any:
    reading = (copyreg.__newobj__, (type(value),))  # type: ignore[attr-defined]
    return *reading, dict(vars(value)), None, None, rebuild.set_attributes


def _replaces_its_dictionary(kind: type) -> bool:
    """Whether a method of the class sets ``self.__dict__``, and pickle's own reducer would copy that dictionary."""
    if not kind.__dictoffset__ or hasattr(kind, "__setstate__"):
        return False
    if any(getattr(kind, name, None) is not getattr(object, name, None) for name in _ASKED):
        return False
    methods = (item for base in kind.__mro__ for item in vars(base).values() if isinstance(item, types.FunctionType))
    return any("__dict__" in method.__code__.co_names and codes.sets(method.__code__, "__dict__") for method in methods)


def _sharing(pickler: Reducing, value: Any) -> Any:
    """Reduces an object with the dictionary of its attributes, which may be the object itself or belong to others."""
    maker, arguments, state, listed, mapped = (*value.__reduce_ex__(5), None, None, None)[:5]
    if isinstance(state, tuple):  # it has slots, too
        return NotImplemented
    return maker, arguments, vars(value), listed, mapped, rebuild.share_attributes


def _enum_member(pickler: Reducing, value: Any) -> Any:
    name = value._name_
    if name is None or type(value).__members__.get(name) is not value:  # several flags
        return NotImplemented
    return rebuild.enum_member, (type(value), name)


def _proxy(pickler: Reducing, value: Any) -> Any:
    """Reduces a proxy of ``multiprocessing.Manager()`` with the key of its manager."""
    build, (*rest, words) = value.__reduce__()
    return rebuild.proxy, (build, *rest, words, bytes(value._authkey))


def _cached_property(pickler: Reducing, value: Any) -> Any:
    return rebuild.cached_property, (type(value), {name: item for name, item in vars(value).items() if name != "lock"})


def _array(pickler: Reducing, value: Any) -> Any:
    numpy = sys.modules["numpy"]
    if value.nbytes < LARGE or value.dtype.hasobject or value.flags.c_contiguous or value.flags.f_contiguous:
        return NotImplemented
    return numpy.ascontiguousarray(value).__reduce_ex__(5)


def _memmap(pickler: Reducing, value: Any) -> Any:
    """A memory-mapped file travels as its path; a view that is not contiguous travels as data."""
    numpy: Any = sys.modules["numpy"]
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


def _lru_cache(pickler: Reducing, value: Any) -> Any:
    parameters = value.cache_parameters()
    parts = (value.__wrapped__, parameters["maxsize"], parameters["typed"])
    state = {name: item for name, item in vars(value).items() if name != "cache_parameters"}
    return rebuild.lru_cache, parts, state, None, None, rebuild.set_attributes


def _tensor(pickler: Reducing, value: Any) -> Any:
    return pickler.tensor(value)


def _optimizer(pickler: Reducing, value: Any) -> Any:
    return reduce_optimizer(value)


def _parametrized(pickler: Reducing, value: Any) -> Any:
    return reduce_parametrized(value)


def _operator(pickler: Reducing, value: Any) -> Any:
    """Reduces a ``torch.library.custom_op``: by name if a module registers it, else with its functions."""
    from ..torch_private import operators

    home = operators.operator_home(value)
    name, *rest = operators.operator_maker(value)
    if home != "__main__" and not byvalue.exists_only_here(home):
        return rebuild.operator_of, (home, name)
    try:
        functions = operators.operator_functions(value)
    except ValueError as error:
        raise pickle.PicklingError(f"{error}; register it in a module beside the notebook") from None
    return rebuild.operator, (name, *rest), functions, None, None, rebuild.set_operator


def _weak_keys(pickler: Reducing, value: Any) -> Any:
    return type(value), (dict(value),)


def _weak(pickler: Reducing, value: Any) -> Any:
    return rebuild.weak_reference, (value(),)


def _weak_proxy(pickler: Reducing, value: Any) -> Any:
    try:
        target = value.__reduce_ex__.__self__  # whatever is asked of a proxy, its object answers
    except ReferenceError:
        target = None
    return rebuild.weak_proxy, (target,)


def _storage(pickler: Reducing, value: Storage) -> Any:
    return reduce_storage(value)


_EXCEPTION_FIELDS = ("errno", "strerror", "filename", "filename2", "name", "path", "obj", "code", "value", "msg",
                     "lineno", "offset", "text", "end_lineno", "end_offset", "print_file_and_line",
                     "encoding", "object", "start", "end", "reason")  # fmt: skip


def _exception(pickler: Reducing, value: BaseException) -> Any:
    """Reduces an exception to its class, arguments, attributes and causes, so that ``__init__`` does not run again."""
    kind = type(value)
    builtin = next(base for base in kind.__mro__ if not base.__flags__ & (1 << 9))
    fields = {name: getattr(value, name) for name in _EXCEPTION_FIELDS if hasattr(builtin, name)}
    names: list[str] = copyreg._slotnames(kind)  # type: ignore[attr-defined]
    slots = {name: getattr(value, name) for name in names if hasattr(value, name)}
    state = {
        "fields": {**{name: item for name, item in fields.items() if item is not None}, **slots},
        "dict": dict(vars(value)),
        "cause": value.__cause__,
        "context": value.__context__,
        "suppress": value.__suppress_context__,
    }
    return rebuild.exception, (kind, value.args), state, None, None, rebuild.set_exception


def _named_type(pickler: Reducing, value: Any) -> Any:
    """``typing.NewType`` and similar types pickle by name, but the rank's namespace lacks the name at that time."""
    if getattr(value, "__module__", None) not in (None, "__main__"):
        return NotImplemented
    if hasattr(value, "__supertype__"):
        return type(value), (value.__name__, value.__supertype__)
    return type(value), (value.__name__,)


def _missing(pickler: Reducing, value: Any) -> Any:
    """``dataclasses`` compares by identity."""
    return rebuild.original, ("dataclasses", "MISSING")


_FIXED: dict[type, Handler] = {
    type(dataclasses.MISSING): _missing,
    Storage: _storage,
    _lru_wrapper: _lru_cache,
    weakref.WeakKeyDictionary: _weak_keys,
    weakref.WeakValueDictionary: _weak_keys,
    weakref.ReferenceType: _weak,
    weakref.ProxyType: _weak_proxy,
    weakref.CallableProxyType: _weak_proxy,
}
_typing = sys.modules["typing"]
for _name in ("NewType", "ParamSpec", "TypeVarTuple"):
    if isinstance(_kind := getattr(_typing, _name, None), type):
        _FIXED[_kind] = _named_type
