"""Captured names as lines of Python: imports, and the source of functions and classes."""

from __future__ import annotations

import ast
import builtins
import dis
import importlib
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

BLOCKS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
USUAL = {
    "nn": "torch.nn",
    "F": "torch.nn.functional",
    "optim": "torch.optim",
    "dist": "torch.distributed",
    "np": "numpy",
}
"""Names that most notebooks give to modules."""
TOOLS = ("typing", "dataclasses", "collections", "collections.abc", "functools", "enum", "abc", "torch", "torch.nn")
"""Modules whose names stand in decorators and annotations."""


@dataclass(frozen=True, order=True)
class Definition:
    """The source of one name. Ordered as it was executed: by cell, then by line."""

    cell: int
    line: int
    text: str


def import_of(name: str, value: Any) -> str | None:
    """The import that gives ``name`` this value; None if there is none."""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}")
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str) or module == "__main__" or "." in path:
        return None
    try:
        found = getattr(importlib.import_module(module), path, None)
    except ImportError:
        return None
    if found is not value:
        return None
    return f"from {module} import {path}" + ("" if path == name else f" as {name}")


def likely_import(name: str) -> str | None:
    """The import that a notebook most likely has for a name that a definition uses before any call."""
    if name in USUAL:
        return f"import {USUAL[name]} as {name}"
    if name in sys.modules:
        return f"import {name}"
    for module in TOOLS:
        if hasattr(importlib.import_module(module), name):
            return f"from {module} import {name}"
    return None


def definition_of(name: str, value: Any, texts: Mapping[str, str]) -> Definition | None:
    """The source of a function or class of the notebook, from the cells ``texts`` by their labels; None without one."""
    if not isinstance(value, (type, types.FunctionType)) or value.__module__ != "__main__":
        return None
    labels = [value.__code__.co_filename] if isinstance(value, types.FunctionType) else _labels_of(value, texts)
    for label in labels:
        for node in _top_level(texts.get(label, "")):
            if _defines(node, value):
                lines = texts[label].splitlines()
                first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
                text = "\n".join(lines[first - 1 : node.end_lineno])
                alias = "" if name == value.__name__ or isinstance(node, ast.Assign) else f"\n{name} = {value.__name__}"
                return Definition(_number(label), first, text + alias)
    return None


def used_at_once(text: str) -> set[str]:
    """The names that a definition needs where it stands: bases, decorators, defaults, annotations, class bodies."""
    return set(_loads(compile(text, "definition", "exec", dont_inherit=True))) - set(vars(builtins))


def _loads(code: types.CodeType) -> Iterator[str]:
    known: set[str] = {"__name__", "__qualname__", "__module__", "__firstlineno__", "__static_attributes__"}
    for one in dis.get_instructions(code):
        if one.opname == "STORE_NAME":
            known.add(one.argval)
        elif one.opname in ("LOAD_NAME", "LOAD_GLOBAL") and one.argval not in known:
            yield one.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType) and not constant.co_flags & inspect.CO_OPTIMIZED:  # a class body
            yield from (name for name in _loads(constant) if name not in known)


def _labels_of(kind: type, texts: Mapping[str, str]) -> list[str]:
    """The cells that may define a class: first those of its methods, then the newest."""
    codes = [getattr(member, "__code__", None) for member in vars(kind).values()]
    own = [code.co_filename for code in codes if code is not None]
    return [*own, *sorted(texts, key=_number, reverse=True)]


def _top_level(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except SyntaxError:  # a cell with a magic or a !command
        return []


def _defines(node: ast.stmt, value: Any) -> bool:
    if isinstance(node, ast.Assign):
        code = getattr(value, "__code__", None)
        return isinstance(node.value, ast.Lambda) and code is not None and node.lineno == code.co_firstlineno
    if not isinstance(node, BLOCKS) or node.name != value.__qualname__:
        return False
    return isinstance(node, ast.ClassDef) == isinstance(value, type)


def _number(label: str) -> int:
    digits = "".join(filter(str.isdigit, label))
    return int(digits) if digits else 0
