"""JSON as values of declared types: the one place that refuses what is malformed in a file or a message.

A dataclass declares its fields, and ``decode`` makes an instance or raises ``Malformed`` with the place. Keys that the
dataclass does not know are passed over: a newer version may have written them.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R", bound="Record")

Decoder = Callable[[Any], Any]

LARGEST = 2**63
"""Whole numbers are smaller than that, above and below zero."""


class Malformed(ValueError):
    """What was read is not of the declared type."""


class Record:
    """A dataclass that is written and read as a JSON object."""

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_json(cls: type[R], value: Any) -> R:
        """Raises ``Malformed``."""
        return decode(cls, value)


def decode(kind: type[T], value: Any) -> T:
    """``value``, as JSON gives it, as a ``kind``: a dataclass or any type of its fields. Raises ``Malformed``."""
    return decoder(kind)(value)  # type: ignore[no-any-return, arg-type]


@cache
def decoder(kind: Any) -> Decoder:
    """The function that makes a ``kind``. Raises ``TypeError`` for a type that JSON has no form for."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union) and type(None) in inner and len(inner) == 2:
        return _optional(decoder(next(one for one in inner if one is not type(None))))
    if origin is tuple and inner[1:] == (...,):
        return _row(decoder(inner[0]))
    if origin is tuple:
        return _fixed([decoder(one) for one in inner])
    if origin is dict:
        return _table(decoder(int) if inner[0] is int else None, decoder(inner[1]))
    if origin is typing.Literal:
        return _choice(inner)
    if is_dataclass(kind):
        return _object(kind)
    raise TypeError(f"{kind} has no JSON form")


def _any(value: Any) -> Any:
    return value


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Malformed(f"expected true or false, not {_shown(value)}")
    return value


def _int(value: Any) -> int:
    """JSON has one kind of numbers: 2.0 is whole."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not -LARGEST < value < LARGEST:
        raise Malformed(f"expected a whole number, not {_shown(value)}")
    return value


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -LARGEST < value < LARGEST:
        raise Malformed(f"expected a number, not {_shown(value)}")
    return float(value)


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise Malformed(f"expected text, not {_shown(value)}")
    return value


_PLAIN: dict[Any, Decoder] = {Any: _any, object: _any, bool: _bool, int: _int, float: _float, str: _str}


def _optional(inner: Decoder) -> Decoder:
    return lambda value: None if value is None else inner(value)


def _row(inner: Decoder) -> Decoder:
    def row(value: Any) -> tuple[Any, ...]:
        return tuple(_at(number, inner, item) for number, item in enumerate(_listed(value)))

    return row


def _fixed(inner: list[Decoder]) -> Decoder:
    def fixed(value: Any) -> tuple[Any, ...]:
        if len(_listed(value)) != len(inner):
            raise Malformed(f"expected {len(inner)} items, not {_shown(value)}")
        return tuple(_at(number, one, item) for number, (one, item) in enumerate(zip(inner, value, strict=True)))

    return fixed


def _table(key: Decoder | None, inner: Decoder) -> Decoder:
    """Keys of JSON are text; whole numbers are written in digits."""

    def table(value: Any) -> dict[Any, Any]:
        made = {}
        for name, item in _keyed(value).items():
            try:
                made[_str(name) if key is None else key(int(name))] = _at(name, inner, item)
            except ValueError as error:
                raise error if isinstance(error, Malformed) else Malformed(f"{_shown(name)} is no number") from None
        return made

    return table


def _choice(words: tuple[Any, ...]) -> Decoder:
    def choice(value: Any) -> Any:
        if not isinstance(value, (str, int, type(None))) or value not in words:
            raise Malformed(f"expected one of {', '.join(map(str, words))}, not {_shown(value)}")
        return value

    return choice


def _object(kind: Any) -> Decoder:
    """A dataclass. Its fields are looked at with the first value: it may hold itself."""
    known: dict[str, Decoder] = {}
    needed: list[str] = []

    def made(value: Any) -> Any:
        if not known:
            hints = typing.get_type_hints(kind)
            own = [one for one in fields(kind) if one.init]
            needed.extend(one.name for one in own if one.default is MISSING and one.default_factory is MISSING)
            known.update({one.name: decoder(hints[one.name]) for one in own})
        given = {name: _at(name, known[name], item) for name, item in _keyed(value).items() if name in known}
        if missing := [name for name in needed if name not in given]:
            raise Malformed(f"{missing[0]} is missing")
        return kind(**given)

    return made


def _at(place: object, inner: Decoder, item: Any) -> Any:
    try:
        return inner(item)
    except Malformed as error:
        raise Malformed(f"{place}: {error}") from None
    except RecursionError:
        raise Malformed(f"{place}: it is nested too deeply") from None


def _listed(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        raise Malformed(f"expected a list, not {_shown(value)}")
    return value


def _keyed(value: Any) -> Any:
    if not isinstance(value, dict):
        raise Malformed(f"expected an object, not {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    if isinstance(value, int) and not -LARGEST < value < LARGEST:
        return "a number of too many digits"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}…"
