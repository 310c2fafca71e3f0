"""Classes that travel by value: a skeleton first, so that other objects can refer to it, then its attributes.

A metaclass and ``__init_subclass__`` of the notebook do not run again: what they did is in the captured objects.
"""

from __future__ import annotations

import abc
import contextlib
import enum
import types
from collections.abc import Iterator
from typing import Any

from . import byvalue

_OF_PYTHON = frozenset({
    "__module__", "__dict__", "__weakref__", "__slotnames__", "__slots__", "__annotate_func__", "__annotate__",
    "__annotations_cache__", "__orig_bases__", "_abc_cache", "_abc_negative_cache",
    "_abc_negative_cache_version", "_abc_registry",
})  # fmt: skip
"""Names that Python itself puts into a class, or that belong to one process."""
_OF_ENUMS = frozenset({
    "_member_names_", "_member_map_", "_value2member_map_", "_member_type_", "_unhashable_values_",
    "_unhashable_values_map_", "_hashable_values_",
})  # fmt: skip
_REGISTERED = "_abc_impl"
_DATA = (int, str, float, bytes, complex, tuple, frozenset, bytearray)


def attributes_of(kind: type) -> dict[str, Any]:
    """The class's own attributes, without what Python makes for each class."""
    out = _OF_PYTHON | ({*_OF_ENUMS, *kind.__members__} if issubclass(kind, enum.Enum) else frozenset())
    # Copies of the names: interned strings would make equal classes pickle differently.
    found = {
        "".join(name): item
        for name, item in sorted(vars(kind).items())
        if name not in out and not isinstance(item, (types.MemberDescriptorType, types.GetSetDescriptorType))
    }
    if _REGISTERED in found:
        registered = (reference() for reference in abc._get_dump(kind)[0])  # type: ignore[attr-defined]
        found[_REGISTERED] = sorted((one for one in registered if one is not None), key=lambda one: one.__qualname__)
    return found


def members_of(kind: type) -> dict[str, dict[str, Any]]:
    """The attributes of an enum's members, by name."""
    if not issubclass(kind, enum.Enum):
        return {}
    hidden = ("__objclass__", "_sort_order_")
    return {
        name: {key: item for key, item in vars(member).items() if key not in hidden}
        for name, member in kind.__members__.items()
        if hasattr(member, "__dict__")
    }


def set_attributes(kind: type, attributes: dict[str, Any], members: dict[str, dict[str, Any]]) -> None:
    """Give the class the attributes, past its metaclass's ``__setattr__``."""
    own = vars(kind)
    for name, item in attributes.items():
        if name == _REGISTERED:
            for one in item:
                abc.ABCMeta.register(kind, one)  # type: ignore[arg-type]
        elif own.get(name, attributes) is not item:
            type.__setattr__(kind, name, item)
    if issubclass(kind, enum.Enum):
        for name in {"__init__", "__new_member__"} & own.keys() - attributes.keys():  # ``_make_enum`` has set them
            type.__delattr__(kind, name)
    for name, state in members.items():
        vars(kind.__members__[name]).update(state)  # type: ignore[attr-defined]


def remove_others(kind: type, attributes: dict[str, Any]) -> None:
    """Remove the class's attributes that are not among ``attributes``."""
    for name in attributes_of(kind).keys() - attributes.keys():
        type.__delattr__(kind, name)


def parts_of(kind: type) -> tuple[Any, ...]:
    """Arguments for ``make``: metaclass, name, bases, what the class statement needs, members of an enum."""
    own = vars(kind)
    body: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    if "__slots__" in own:
        body["__slots__"] = own["__slots__"] if isinstance(own["__slots__"], str) else tuple(own["__slots__"])
    if "__orig_bases__" in own:
        body["__orig_bases__"] = own["__orig_bases__"]
    if isinstance(own.get("__dict__"), property):
        body["__dict__"] = own["__dict__"]
    members = None
    if issubclass(kind, enum.Enum):
        members = {name: (member.value, _plain(member)) for name, member in kind.__members__.items()}
    meta = None if type(kind) is enum.EnumMeta else type(kind)  # its name differs from release to release
    return meta, kind.__name__, kind.__bases__, body, members


def _plain(member: Any) -> Any:
    """The arguments that make the number or text of a member of ``class Level(int, Enum)``; None if it is none."""
    base = _data_type(type(member))
    if base is None:
        return None
    return base.__getnewargs__(member) if hasattr(base, "__getnewargs__") else (base(member),)


def _data_type(kind: type) -> Any:
    return next((base for base in kind.__mro__ if base in _DATA), None)


def make(meta: type | None, name: str, bases: tuple[Any, ...], body: dict[str, Any], members: Any) -> type:
    """A class without its attributes."""
    kind = meta or enum.EnumMeta
    library: Any = next(base for base in kind.__mro__ if not byvalue.carries(base))
    if library.__name__ == "_TypedDictMeta":
        bases = types.resolve_bases(body.get("__orig_bases__", ()))
    parents = {parent for base in bases for parent in base.__mro__}
    with contextlib.ExitStack() as aside:
        for parent in filter(byvalue.carries, parents):
            aside.enter_context(_without_init_subclass(parent))
        try:
            return _make(library, kind, name, bases, body, members)
        except TypeError:  # a library's __init_subclass__ may need arguments that are known nowhere
            for parent in parents:
                if isinstance(getattr(vars(parent).get("__init_subclass__"), "__func__", None), types.FunctionType):
                    aside.enter_context(_without_init_subclass(parent))
            return _make(library, kind, name, bases, body, members)


def _make(library: Any, kind: type, name: str, bases: tuple[Any, ...], body: dict[str, Any], members: Any) -> type:
    names = library.__prepare__(name, bases)
    names.update(body)
    if members is not None:
        return _make_enum(library, kind, name, bases, names, members)
    made: type = library.__new__(kind, name, bases, names)
    library.__init__(made, name, bases, names)
    return made


def _make_enum(library: Any, kind: type, name: str, bases: tuple[Any, ...], names: Any, members: Any) -> type:
    """An enum whose members are made without ``__new__`` and ``__init__`` of the notebook."""

    def __new__(cls: Any, key: Any) -> Any:
        value, plain = members[key[0] if isinstance(key, tuple) else key]
        base = _data_type(cls)
        member = object.__new__(cls) if base is None else base.__new__(cls, *plain)
        member._value_ = value
        return member

    names["__new__"], names["__init__"] = __new__, lambda self, *_: None
    for member in members:
        names[member] = (member,)
    made: type = library.__new__(kind, name, bases, names)
    return made


@contextlib.contextmanager
def _without_init_subclass(parent: type) -> Iterator[None]:
    own = vars(parent).get("__init_subclass__")
    if own is None:
        yield
        return
    type.__delattr__(parent, "__init_subclass__")
    try:
        yield
    finally:
        type.__setattr__(parent, "__init_subclass__", own)
