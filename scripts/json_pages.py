"""The tables of ``docs/programs.md``: what ``--json`` prints, from the classes of ``verbs/schema.py``."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

from jupyter_torchdist.verbs import schema

from .messages import cell
from .protocol_types import field_docs

_PLAIN = {str: "text", int: "whole number", float: "number", bool: "true or false", Any: "anything"}


def text() -> str:
    """The verbs, then every type that they need, in the order of their first use."""
    lines = ["| verb | prints |", "|---|---|"]
    lines += [f"| `{verb}` | {_printed(printed)} |" for verb, printed in schema.OF_VERB.items()]
    lines += ["| any, where it fails | one [`Failed`](#failed) as its last line |"]
    for kind in kinds():
        lines += [
            "",
            f"### `{kind.__name__}`",
            "",
            _words(kind.__doc__),
            "",
            "| field | type | meaning |",
            "|---|---|---|",
        ]
        docs, hints = field_docs(kind), typing.get_type_hints(kind)
        for one in dataclasses.fields(kind):
            lines.append(f"| `{one.name}` | {named(hints[one.name])} | {cell(_words(docs.get(one.name)))} |")
    return "\n".join(lines) + "\n"


def kinds() -> list[type]:
    """All classes of the answers."""
    found: dict[type, None] = {}
    for printed in schema.OF_VERB.values():
        for kind in (printed.lines, printed.last):
            if kind is not None:
                _collect(kind, found)
    _collect(schema.Failed, found)
    return list(found)


def _collect(kind: type, found: dict[type, None]) -> None:
    if kind not in found:
        found[kind] = None
        for hint in typing.get_type_hints(kind).values():
            for inner in _classes(hint):
                _collect(inner, found)


def _classes(hint: Any) -> Iterator[type]:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        yield hint
    for inner in typing.get_args(hint):
        yield from _classes(inner)


def named(hint: Any) -> str:
    """A type in words: ``list of Finding``, ``text or null``."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in _PLAIN:
        return _PLAIN[hint]
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if one is type(None) else named(one) for one in inner)
    if origin is tuple and inner[1:] == (...,):
        return f"list of {named(inner[0])}"
    if origin is tuple:
        return f"list: {', '.join(map(named, inner))}"
    if origin is dict:
        return f"object of {named(inner[1])}"
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return f"[`{hint.__name__}`](#{hint.__name__.lower()})"
    raise TypeError(f"{hint} has no name for docs/programs.md")


def _printed(printed: schema.Printed) -> str:
    parts = [
        f"{named(printed.lines)}, one a line" if printed.lines else "",
        named(printed.last) if printed.last else "",
    ]
    return "; then ".join(filter(None, parts))


def _words(doc: str | None) -> str:
    """The first paragraph of a docstring."""
    paragraph = inspect.cleandoc(doc or "").partition("\n\n")[0].replace("\n", " ")
    return re.sub(r"``(.*?)``", r"`\1`", paragraph)
