"""The source of user code: its functions, and the variables to which its names refer."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Iterator
from types import CodeType

from . import positions

_TAKES = frozenset({
    "apply", "filter", "map", "max", "min", "register_buffer", "register_forward_hook", "register_full_backward_hook",
    "register_hook", "sort", "sorted", "tree_map",
})  # fmt: skip
"""Functions that call a function passed to them."""

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
Block = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Key = tuple[int, str]
"""A variable: the id of its function's node (0: global), and its name; ``.name`` for an attribute."""


MAGIC_LINE = "%%distribute"


def remember_source(label: str, text: str) -> None:
    """Put a source into ``linecache`` for tracebacks; without mtime, so that it is never compared with a file."""
    linecache.cache[label] = (len(text), None, text.splitlines(keepends=True), label)


def remember_cell(source: str, label: str, first_line: int) -> None:
    """Put the cell's source into ``linecache`` under ``label``, with the magic line and the right line numbers."""
    above = "\n" * (first_line - 2) + MAGIC_LINE + "\n" if first_line > 1 else ""
    remember_source(label, above + source)


def loop_at(tree: ast.Module, line: int) -> ast.For | ast.While | None:
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For | ast.While) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return max(around, key=lambda node: node.lineno, default=None)


def functions_of(tree: ast.Module, code: CodeType) -> list[Function]:
    """The functions that ``code`` may be. None for a comprehension: it has its own code, without the lines around."""
    if code.co_name == "<lambda>":
        return _lambda_of(tree, code)
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [node for node in functions if node.name == code.co_name and _begins(node) == code.co_firstlineno]


def _begins(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])


def _lambda_of(tree: ast.Module, code: CodeType) -> list[Function]:
    """The lambda of ``code``. Several in one line are distinguished by columns; empty if that is not possible."""
    found: list[Function] = [
        node for node in ast.walk(tree) if isinstance(node, ast.Lambda) and node.lineno == code.co_firstlineno
    ]
    if len(found) > 1:
        extent = positions.extent(code)
        found = [one for one in found if isinstance(one, ast.Lambda) and positions.span_of(one.body) == extent]
    return found if len(found) == 1 else []


def arguments_of(function: Function) -> set[str]:
    return {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)}


class Scopes:
    """To which variable a name refers, and to which of the user's functions it may refer."""

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        self.trees = list(trees)
        self.around: dict[ast.AST, Function | None] = {}
        self._owned: dict[Function, set[str]] = {}
        self._methods: dict[str, list[Function]] = {}
        self._functions: dict[Key, list[Function]] = {}
        self.methods: list[Function] = []
        self.handed: list[Function] = []
        """Functions used as values, in a table or a variable: their calls cannot be found by name."""
        for tree in self.trees:
            self._enter(tree)
        for function, owned in self._owned.items():
            for one in ast.walk(function):
                if isinstance(one, ast.Global | ast.Nonlocal) and self.around[one] is function:
                    owned -= {*one.names}
        for node in list(self.around):
            self._define(node)
        for tree in self.trees:
            self.handed += self._handed(tree)

    def _enter(self, tree: ast.Module) -> None:
        below: list[tuple[ast.AST, Function | None]] = [(tree, None)]
        while below:
            node, function = below.pop()
            self.around[node] = function
            if function is not None:
                self._owned[function] |= names_bound_at(node)
            if isinstance(node, Function):
                self._owned[node] = arguments_of(node)
                function = node
            below += [(child, function) for child in ast.iter_child_nodes(node)]

    def _define(self, node: ast.AST) -> None:
        if isinstance(node, ast.ClassDef):
            own = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
            self.methods += own
            made = [one for one in own if one.name == "__init__"]
            self._functions.setdefault(self.key(node.name, self.around[node]), []).extend(made)
            self._methods.setdefault(node.name, []).extend(made)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._functions.setdefault(self.key(node.name, self.around[node]), []).append(node)
            self._methods.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    self._functions.setdefault(self.key(target.id, self.around[node]), []).append(node.value)
                elif isinstance(target, ast.Attribute):
                    self._methods.setdefault(target.attr, []).append(node.value)

    def _handed(self, tree: ast.Module) -> Iterator[Function]:
        known: set[ast.AST] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                known.add(node.func)
                name = called_name(node)
                if name in _TAKES or (name[:1].isupper() and not self.named(node.func)):
                    known |= {*node.args, *(one.value for one in node.keywords)}
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
                known.add(node.value)
        for node in ast.walk(tree):
            if node in known:
                continue
            if isinstance(node, ast.Lambda):
                yield node
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                yield from self.named(node)

    def key(self, name: str, function: Function | None) -> Key:
        while function is not None:
            if name in self._owned[function]:
                return id(function), name
            function = self.around[function]
        return 0, name

    def named(self, node: ast.AST) -> list[Function]:
        """The functions to which the expression may refer; a method only by its name, of any class."""
        if isinstance(node, ast.Attribute):
            return self._methods.get(node.attr, [])
        return self._functions.get(self.key(node.id, self.around[node]), []) if isinstance(node, ast.Name) else []

    def callables(self) -> list[Function]:
        """The methods that the call of an object may run."""
        return self._methods.get("__call__", [])


def names_bound_at(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return {node.id}
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.alias):
        return {(node.asname or node.name).partition(".")[0]}
    names = (getattr(node, "name", None), getattr(node, "rest", None))  # of patterns and exceptions
    return {name for name in names if isinstance(name, str)}


def bodies_around(tree: ast.Module, loop: ast.stmt) -> list[tuple[ast.AST, list[ast.stmt]]]:
    """Pairs of a node and its statement list that contain the loop, from innermost to the function or the cell."""
    found: list[tuple[ast.AST, list[ast.stmt]]] = []

    def descend(node: ast.AST) -> None:
        bodies = [getattr(node, part, None) for part in ("body", "orelse", "finalbody")]
        for body in [*bodies, *(one.body for part in ("handlers", "cases") for one in getattr(node, part, []))]:
            if isinstance(body, list) and any(loop in ast.walk(one) for one in body):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.clear()
                found.append((node, body))
                for one in body:
                    if one is not loop and loop in ast.walk(one):
                        descend(one)

    descend(tree)
    return found[::-1]


def name_of(function: Function) -> str:
    return "a lambda" if isinstance(function, ast.Lambda) else function.name


def called_name(call: ast.Call) -> str:
    """The name of the called function or method; empty if there is none."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def bound_by(target: ast.AST) -> set[str]:
    return {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}


def names_in(node: ast.AST) -> set[str]:
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return names | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
