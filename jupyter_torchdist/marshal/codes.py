"""The names that code refers to, and digests that identify a function or class in another process."""

from __future__ import annotations

import dis
import functools
import hashlib
import opcode
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from . import commands

_GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"})
_EXTENDED = opcode.opmap["EXTENDED_ARG"]
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(...))
_MAGIC_VERBS = ("run_line_magic", "run_cell_magic", "magic")
_RANK_VERBS = ("system", "getoutput", "getoutput_split")


@dataclass
class References:
    """Names that a code object and its nested code objects use. Each name maps to its first line in the file."""

    loads: dict[str, int] = field(default_factory=dict)
    stores: dict[str, int] = field(default_factory=dict)
    imports: dict[str, int] = field(default_factory=dict)
    attributes: set[str] = field(default_factory=set)
    magics: dict[str, int] = field(default_factory=dict)
    """IPython magics: ``get_ipython().run_line_magic('time', …)``."""
    commands: dict[str, int] = field(default_factory=dict)
    """Names in ``!command``. They may be names of the notebook or variables of the system shell."""
    texts: set[str] = field(default_factory=set)
    """String constants."""


_TEXT = 10_000
"""Longer string constants are no code."""


def spoken(found: References, by_text: bool | None = None) -> set[str]:
    """Names that the code may look up by a string: for ``eval``, ``globals()["x"]``, ``df.query("a > @x")``.

    ``by_text``: whether it looks up names by strings at all; None: as its own names say.
    """
    texts = list(found.texts)
    names: set[str] = set()
    if found.attributes & {"query", "eval"}:
        names |= {name for text in texts for name in re.findall(r"@(\w+)", text)}
    if by_text or (by_text is None and BY_TEXT & found.loads.keys()):
        names |= {name for text in texts for name in re.findall(r"[^\W\d]\w*", text)}
    if "__main__" in found.imports:
        names |= found.attributes
    return names


BY_TEXT = frozenset({"eval", "exec", "globals"})


@functools.lru_cache(maxsize=2048)
def references(code: types.CodeType) -> References:
    """The global names, imported modules, attributes and magics of ``code`` and the code nested in it."""
    found = References()
    for part in nested(code):
        _collect(part, found)
    return found


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """``code`` and every code object in its constants."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested(constant)


def _collect(code: types.CodeType, found: References) -> None:
    line = code.co_firstlineno
    found.attributes.update(code.co_names)
    found.texts.update(text for text in code.co_consts if isinstance(text, str) and len(text) < _TEXT)
    verb: str | None = None
    for instruction in dis.get_instructions(code):
        if instruction.starts_line is not None and not isinstance(instruction.starts_line, bool):
            line = instruction.starts_line
        elif (number := getattr(instruction, "line_number", None)) is not None:
            line = number
        name, value = instruction.opname, instruction.argval
        if name in _GLOBAL_OPS:
            if name != "STORE_GLOBAL":  # what is deleted must be there
                found.loads.setdefault(value, line)
            if name in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                found.stores.setdefault(value, line)
        elif name == "IMPORT_NAME":
            found.imports.setdefault(value, line)
        elif value in (*_MAGIC_VERBS, *_RANK_VERBS) and "get_ipython" in code.co_names:
            verb = value
        elif verb in _RANK_VERBS and isinstance(value, str):
            for used in commands.names(value):
                found.commands.setdefault(used, line)
            verb = None
        elif verb and isinstance(value, str):
            found.magics.setdefault(("%%" if verb == "run_cell_magic" else "%") + value.split(" ")[0], line)
            verb = None


@functools.lru_cache(maxsize=2048)
def sets(code: types.CodeType, attribute: str) -> bool:
    """Whether the code sets the attribute of some object."""
    return any(one.opname == "STORE_ATTR" and one.argval == attribute for one in dis.get_instructions(code))


def code_digest(code: types.CodeType) -> str:
    """A digest that is equal for code compiled from the same text, in any file and at any line."""
    return hashlib.sha256(repr(_shape(code)).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _shape(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return (
            value.co_name, value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags,
            value.co_code, value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars,
            [_shape(constant) for constant in value.co_consts],
        )  # fmt: skip
    if isinstance(value, (tuple, list)):
        return [type(value).__name__, *map(_shape, value)]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(_shape(item)) for item in value)
    if isinstance(value, (staticmethod, classmethod)):
        return [type(value).__name__, _shape(value.__func__)]
    if isinstance(value, property):
        return ["property", *map(_shape, (value.fget, value.fset, value.fdel))]
    if isinstance(value, types.FunctionType):
        return ["function", _shape(value.__code__)]
    if isinstance(value, _ATOMS):
        return value
    return type(value).__qualname__


def class_digest(kind: type) -> str:
    """A digest that is equal for classes made from the same text: bases and methods. Plain attributes may change."""
    code = (staticmethod, classmethod, property, types.FunctionType)
    members = {name: _shape(value) for name, value in sorted(vars(kind).items()) if isinstance(value, code)}
    shape = (kind.__qualname__, [base.__qualname__ for base in kind.__bases__], members)
    return hashlib.sha256(repr(shape).encode("utf-8", "surrogatepass")).hexdigest()[:32]
