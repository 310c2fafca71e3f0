"""Classes for another release of Python whose methods ``dataclass``, ``namedtuple`` or ``enum`` has written: anew.

What the library wrote has no source, and its private parts differ from release to release.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import inspect
import types
from collections.abc import Callable
from typing import Any

from . import byvalue, rebuild

_FIELDS, _PARAMETERS = "__dataclass_fields__", "__dataclass_params__"
_OF_A_FIELD = ("default", "default_factory", "init", "repr", "hash", "compare", "metadata", "kw_only")
_OF_A_TUPLE = ("__new__", "_make", "_replace", "__repr__", "_asdict", "__getnewargs__", "__replace__")
_OF_AN_ENUM = frozenset({
    "_boundary_", "_flag_mask_", "_all_bits_", "_singles_mask_", "_inverted_", "_use_args_", "_new_member_",
    "_value_repr_", "__new__", "__new_member__", "__format__", "__reduce_ex__", "__or__", "__and__", "__xor__",
    "__ror__", "__rand__", "__rxor__", "__invert__",
})  # fmt: skip
"""What ``EnumMeta`` itself writes into an enum."""

Again = Callable[..., None]


def without_generated(kind: type, attributes: dict[str, Any]) -> tuple[dict[str, Any], tuple[Again, Any] | None]:
    """The class's own attributes, and what writes the others anew: a function of the class and of a value."""
    if _FIELDS in vars(kind) and _PARAMETERS in vars(kind):
        return _without_dataclass(kind, attributes)
    if tuple in kind.__bases__ and "_fields" in vars(kind) and "_field_defaults" in vars(kind):
        own = {name: value for name, value in attributes.items() if not _of_a_tuple(name, value)}
        written = [name for name in _OF_A_TUPLE if name in own]
        fields: Any = vars(kind)
        return own, (write_namedtuple, (fields["_fields"], tuple(fields["_field_defaults"].values()), written))
    if issubclass(kind, enum.Enum):
        return {name: value for name, value in attributes.items() if not _of_an_enum(name, value)}, None
    return attributes, None


def _of_an_enum(name: str, value: Any) -> bool:
    function = getattr(value, "__func__", value)
    written = isinstance(function, types.FunctionType) and byvalue.carries(function)
    return name in _OF_AN_ENUM and ((name.startswith("_") and not name.startswith("__")) or not written)


def set_class(target: type, state: tuple[Any, tuple[Again, Any] | None]) -> None:
    """Set the attributes; then write what was left out. Streams contain the names of this and of the two below."""
    attributes, again = state
    rebuild.set_class(target, attributes)
    if again is not None and not rebuild.is_kept(target):
        write, value = again
        write(target, value)


# ------------------------------------------------------------------------------------------------------- dataclasses


def _without_dataclass(kind: Any, attributes: dict[str, Any]) -> tuple[dict[str, Any], tuple[Again, Any]]:
    own = {name: value for name, value in attributes.items() if not _of_a_dataclass(name, value)}
    if "__eq__" not in own and own.get("__hash__", ...) is None:
        del own["__hash__"]  # it is None because there is an ``__eq__``
    fields = kind.__dataclass_fields__
    annotated = vars(kind).get("__annotations__", {})
    mine = {name: _words(fields[name]) for name in annotated if name in fields and not _is_class_variable(fields[name])}
    parameters = _parameters(kind.__dataclass_params__)
    bases = [base for base in kind.__mro__[1:] if _FIELDS in vars(base)]
    return own, (write_dataclass, (mine, parameters, bases))


def _of_a_dataclass(name: str, value: Any) -> bool:
    if name in (_FIELDS, _PARAMETERS, "__replace__", "__match_args__"):
        return True
    inner = inspect.unwrap(value) if isinstance(value, types.FunctionType) else value
    return isinstance(inner, types.FunctionType) and inner.__code__.co_filename == "<string>"


def _is_class_variable(field: Any) -> bool:
    return str(getattr(field._field_type, "name", "")) == "_FIELD_CLASSVAR"


def _words(field: Any) -> dict[str, Any]:
    """The arguments of ``dataclasses.field``."""
    given = {name: getattr(field, name) for name in _OF_A_FIELD}
    given["metadata"] = dict(field.metadata)
    return {name: value for name, value in given.items() if value is not dataclasses.MISSING}


def _parameters(given: Any) -> dict[str, bool]:
    """The arguments of ``dataclass``. The class has its slots already."""
    names = set(inspect.signature(dataclasses.dataclass).parameters) - {"slots", "weakref_slot"}
    return {name: getattr(given, name) for name in sorted(names) if hasattr(given, name)}


def write_dataclass(kind: Any, value: tuple[dict[str, dict[str, Any]], dict[str, bool], list[Any]]) -> None:
    """Have ``dataclass`` write its methods. Raises ``TypeError`` when a base is not complete yet."""
    fields, parameters, bases = value
    if missing := [base.__name__ for base in bases if _FIELDS not in vars(base)]:
        name = kind.__name__
        raise TypeError(f"the dataclass {name} needs its base {missing[0]}, which itself needs {name}")
    known = inspect.signature(dataclasses.dataclass).parameters
    slots = {name: vars(kind)[name] for name in fields if isinstance(vars(kind).get(name), types.MemberDescriptorType)}
    for name, words in fields.items():
        setattr(kind, name, dataclasses.field(**words))
    dataclasses.dataclass(**{name: given for name, given in parameters.items() if name in known})(kind)
    for name, descriptor in slots.items():
        setattr(kind, name, descriptor)


# -------------------------------------------------------------------------------------------------------- namedtuples


def _of_a_tuple(name: str, value: Any) -> bool:
    function = getattr(value, "__func__", value)
    home = str(getattr(function, "__globals__", {}).get("__name__"))
    return name in _OF_A_TUPLE and home.startswith(("collections", "namedtuple_"))


def write_namedtuple(kind: Any, value: tuple[tuple[str, ...], tuple[Any, ...], list[str]]) -> None:
    """The methods of ``collections.namedtuple`` without those that the class has ``written`` itself."""
    fields, defaults, written = value
    make: Any = collections.namedtuple
    made = make(kind.__name__, fields, defaults=defaults, module=kind.__module__)
    for name in _OF_A_TUPLE:
        if name in vars(made) and name not in written:
            setattr(kind, name, vars(made)[name])
