"""Which attributes a source text sets or changes: ``settings.BATCH = 64``, ``settings.SEEN.append(3)``.

This module only reads the text. The callers know whether a line ran and which objects its names refer to.
"""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    SET = "set"
    DELETED = "deleted"
    CHANGED = "changed"
    """Something below the attribute is set."""
    CALLED = "called"
    """A method of the attribute is called, which may change it."""


@dataclass(frozen=True)
class Touch:
    """``path``: the names from the root on, which is ``cls`` for ``type(self).n`` and ``self.__class__.n``, too.
    ``module``: the module that the text imports as the root, if any."""

    path: tuple[str, ...]
    kind: Kind
    module: str = ""


@dataclass(frozen=True)
class Facts:
    """``own`` is what functions in the text set and change, including global names of the text."""

    imports: frozenset[str] = frozenset()
    """Full names of absolute imports; ``from torch.nn import functional`` gives ``torch.nn.functional``, too."""
    touches: frozenset[Touch] = frozenset()
    own: frozenset[Touch] = frozenset()


CLASS, INSTANCE = "cls", "self"
_CODE_MAGICS = ("distribute", "time", "timeit", "capture", "prun")
_NOTHING = Facts()


@functools.lru_cache(maxsize=8192)
def facts(text: str | bytes) -> Facts:
    """The facts of a module's text or of a cell as IPython transformed it, with the code below ``%%time`` and similar
    magics. A text with a syntax error has no facts."""
    try:
        trees = list(_trees(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _NOTHING
    nodes = [node for tree in trees for node in ast.walk(tree)]
    imports = dict(pair for node in nodes for pair in _imports(node))
    functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))]
    inner = {id(node): node for function in functions for node in ast.walk(function)}
    return Facts(
        frozenset(name for node in nodes for name in _imported(node)),
        frozenset(touch for node in nodes for touch in _touches(node, imports)),
        frozenset(touch for node in inner.values() for touch in (*_touches(node, imports), *_globals(node))),
    )


def _trees(text: str | bytes) -> Iterator[ast.AST]:
    tree = ast.parse(text)
    yield tree
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "_magic" in node.func.attr:
            words = [item.value for item in node.args if isinstance(item, ast.Constant) and isinstance(item.value, str)]
            if words and words[0] in _CODE_MAGICS:
                yield from _trees(textwrap.dedent(words[-1]))


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Pairs of the name that an import binds and the module's name."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for alias in node.names:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _touches(node: ast.AST, imports: dict[str, str]) -> Iterator[Touch]:
    for path, kind in _paths(node):
        if path:
            yield Touch(path, kind, imports.get(path[0], ""))


def _paths(node: ast.AST) -> Iterator[tuple[tuple[str, ...], Kind]]:
    if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
        yield _chain(node, Kind.DELETED if isinstance(node.ctx, ast.Del) else Kind.SET)
    elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        yield _chain(node.value, Kind.CHANGED)
    elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        yield (node.target.id,), Kind.CHANGED
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        yield _chain(node.func.value, Kind.CALLED)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) >= 2:
        kind = {"setattr": Kind.SET, "delattr": Kind.DELETED}.get(node.func.id)
        if kind and isinstance(name := node.args[1], ast.Constant) and isinstance(name.value, str):
            yield _chain(ast.Attribute(node.args[0], name.value, ast.Store()), kind)


def _chain(node: ast.expr, kind: Kind) -> tuple[tuple[str, ...], Kind]:
    """The names that lead to the expression. A change below a call or an index counts as a change of the last name."""
    names: list[str] = []
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Subscript):
            names, kind, node = [], Kind.CHANGED, node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            names, kind, node = [], Kind.CHANGED, node.func.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type":
            return (CLASS, *reversed(names)), kind
        else:
            return (), kind
    if names[-1:] == ["__class__"]:
        return (CLASS, *reversed(names[:-1])), kind
    return (node.id, *reversed(names)), kind


def _globals(node: ast.AST) -> Iterator[Touch]:
    if isinstance(node, ast.Global):
        for name in node.names:
            yield Touch((name,), Kind.SET)
