"""Finds the expression behind a name in running code: an assignment, or an argument of the caller.

User code is not run: sources are parsed, and frames are inspected.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
import textwrap
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from ...usercode import positions

FAR = 16
"""How many frames an argument is followed through."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Source = tuple[ast.AST, FrameType]
"""An expression, and the frame in which its names are evaluated."""


def running(frame: FrameType) -> ast.AST | None:
    """The expression or statement that ``frame`` is running; the full line if its columns are not known."""
    lines = linecache.getlines(frame.f_code.co_filename)
    if not 0 < frame.f_lineno <= len(lines):
        return None
    text = lines[frame.f_lineno - 1]
    span = positions.running(frame)
    if span is not None:
        text = _cut(lines, span)
    try:
        return ast.parse(textwrap.dedent(text).strip())
    except SyntaxError:
        return None


def _cut(lines: list[str], span: positions.Span) -> str:
    chosen = [line.encode() for line in lines[span.line - 1 : span.end_line]]
    chosen[-1] = chosen[-1][: span.end_column]
    chosen[0] = chosen[0][span.column :]
    joined = b"".join(chosen).decode(errors="replace")
    return f"({joined})" if len(chosen) > 1 and not re.search(r"^\s*\w[^=]*[^=!<>]=", joined) else joined


def sources(name: str, frame: FrameType) -> list[Source]:
    """The expressions that ``name`` may have been bound to; none if one of them cannot be found."""
    found = [(one, frame) for one in _assigned(frame.f_code, name)]
    if name not in _parameters(frame.f_code):
        return found
    given = _given(name, frame, FAR)
    if given is None or (isinstance(given[0], ast.Constant) and given[0].value is None):
        return found if given else []  # ``if n is None: n = len(x)``
    if isinstance(given[0], ast.Name) and given[1] is not frame:
        return [*found, *(sources(given[0].id, given[1]) or [given])]
    return [*found, given]


def _parameters(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _given(name: str, frame: FrameType, far: int) -> Source | None:
    """The argument that the caller of ``frame`` passed for a parameter, or its default."""
    caller = frame.f_back
    call = None if caller is None else _call_at(caller)
    if caller is None or call is None:
        return None
    code = frame.f_code
    found = _keyword(call, name, caller, far)
    if found is None and name in code.co_varnames[: code.co_argcount]:
        place = code.co_varnames.index(name)
        bound = isinstance(call.func, ast.Attribute) and code.co_varnames[0] in ("self", "cls")
        found = _positional(call, place - bound, caller, far)
    return found or _default(code, name, frame)


def _call_at(frame: FrameType) -> ast.Call | None:
    tree = running(frame)
    return next((node for node in ast.walk(tree) if isinstance(node, ast.Call)), None) if tree is not None else None


def _keyword(call: ast.Call, name: str, caller: FrameType, far: int) -> Source | None:
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value, caller
        if keyword.arg is None and isinstance(keyword.value, ast.Name) and far:
            passed = caller.f_locals.get(keyword.value.id)
            if type(passed) is dict and name in passed and caller.f_back is not None:
                further = _call_at(caller.f_back)  # ``def wrapper(*args, **kwargs): return function(*args, **kwargs)``
                return None if further is None else _keyword(further, name, caller.f_back, far - 1)
    return None


def _positional(call: ast.Call, place: int, caller: FrameType, far: int) -> Source | None:
    before = call.args[: place + 1]
    if len(before) == place + 1 and not any(isinstance(one, ast.Starred) for one in before):
        return call.args[place], caller
    starred = next((at for at, one in enumerate(before) if isinstance(one, ast.Starred)), None)
    code = caller.f_code
    if starred is None or not far or caller.f_back is None or not code.co_flags & 0x04:  # it takes ``*args``
        return None
    rest = call.args[starred]
    named = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
    if not isinstance(rest, ast.Starred) or not isinstance(rest.value, ast.Name) or rest.value.id != named:
        return None
    further = _call_at(caller.f_back)
    bound = further is not None and isinstance(further.func, ast.Attribute) and code.co_varnames[0] in ("self", "cls")
    at = place - starred + code.co_argcount - bound
    return None if further is None else _positional(further, at, caller.f_back, far - 1)


def _default(code: CodeType, name: str, frame: FrameType) -> Source | None:
    function = _function(code)
    if function is None:
        return None
    given = function.args
    positional = [one.arg for one in (*given.posonlyargs, *given.args)]
    defaults: dict[str, ast.AST | None] = dict(zip(positional[::-1], given.defaults[::-1], strict=False))
    defaults |= dict(zip([one.arg for one in given.kwonlyargs], given.kw_defaults, strict=True))
    found = defaults.get(name)
    return None if found is None else (found, frame)


def _assigned(code: CodeType, name: str) -> list[ast.AST]:
    """The expressions assigned to ``name``; none if it is also bound in another way (a loop, ``+=``)."""
    function = _function(code)
    local = function is not None and name in (*code.co_varnames, *code.co_cellvars)
    nodes = _own(function) if local and function is not None else ast.walk(_tree(code.co_filename))
    found: list[ast.AST] = []
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == name:
                    found.append(node.value)
                elif isinstance(target, ast.Tuple) and name in (names := [getattr(e, "id", "") for e in target.elts]):
                    found.append(_item(node.value, names.index(name)))
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and isinstance(node.target, ast.Name):
            if node.target.id == name and node.value is not None:
                found.append(node.value)
        elif isinstance(node, (ast.For, ast.comprehension, ast.AugAssign)):
            if any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node.target)):
                return []
        elif isinstance(node, ast.arg) and node.arg == name and not local:
            return []
    return found


def _item(node: ast.AST, at: int) -> ast.AST:
    """One item of an unpacking: ``x.shape[0]`` for ``B, T = x.shape``; ``len(x)`` for ``B, T = len(x), 3``."""
    if isinstance(node, ast.Tuple) and not any(isinstance(one, ast.Starred) for one in node.elts):
        return node.elts[at]
    return ast.Subscript(node, ast.Constant(at), ast.Load())  # type: ignore[arg-type]


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without the nodes of nested functions."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, Function | ast.Lambda | ast.ClassDef):
            yield from _own(child)


def _function(code: CodeType) -> Function | None:
    """The definition in the source from which ``code`` was compiled."""
    for node in _functions(_tree(code.co_filename)):
        first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        if node.name == code.co_name and first == code.co_firstlineno:
            return node
    return None


@functools.lru_cache(maxsize=64)
def _functions(tree: ast.AST) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def _tree(filename: str) -> ast.Module:
    return positions.tree_of(filename) or ast.Module([], [])


def _statement(frame: FrameType) -> ast.stmt | None:
    """The innermost statement at ``frame``."""
    line = frame.f_lineno
    around = [
        node
        for node in ast.walk(_tree(frame.f_code.co_filename))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return max(around, key=lambda node: (node.lineno, -(node.end_lineno or 0)), default=None)


def decides(frame: FrameType) -> bool:
    """Whether a number that the statement at ``frame`` reads may be compared: there, or by the name that it gets."""
    statement, function = _statement(frame), _function(frame.f_code)
    if isinstance(statement, ast.If | ast.While):
        return True
    if statement is None or isinstance(statement, ast.Assert):
        return False
    if any(isinstance(node, ast.Compare | ast.IfExp) for node in ast.walk(statement)):
        return True
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    tests = (
        node if isinstance(node, ast.Compare) else node.test
        for node in (_own(function) if function is not None else ())
        if isinstance(node, ast.Compare | ast.If | ast.IfExp | ast.While)
    )
    return any(isinstance(node, ast.Name) and node.id in names for test in tests for node in ast.walk(test))


def chooses(frame: FrameType) -> bool:
    """Whether the statement at ``frame`` chooses between computations; false if it only checks or prints."""
    statement = _statement(frame)
    if isinstance(statement, ast.Assert):
        return False
    if isinstance(statement, ast.If) and not statement.orelse:
        return not all(isinstance(one, ast.Raise | ast.Expr | ast.Pass) for one in statement.body)
    return True


def value_of(node: ast.AST, frame: FrameType) -> Any:
    """The value of a name, an attribute or an item, found without running user code."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        return -node.operand.value if isinstance(node.operand.value, int) else None
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        return getattr(value_of(node.value, frame), "__dict__", {}).get(node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        holder = value_of(node.value, frame)
        if type(holder) is dict:
            return holder.get(node.slice.value)
        if type(holder) in (list, tuple) and isinstance(node.slice.value, int):
            return dict(enumerate(holder)).get(node.slice.value)
    return None
