"""What a loop may still do with a batch that it has not done in the steps that were watched.

A branch that was not taken (``if step % 100 == 0: print(accuracy(out, y))``) may read the batch later. So the lines
that run are noted, and those statements of the loop that did not run are searched for names that hold the batch.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

from ..autolog import is_users

_READS = frozenset({"item", "tolist", "numpy", "size", "shape", "float", "int", "len", "print", "bool", "numel"})


class LinesRun:
    """Notes which lines of user code run, in the frame of a loop and in what it calls."""

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        self.lines: dict[CodeType, set[int]] = {frame.f_code: set()}
        self._on = False

    def start(self) -> bool:
        """False where a debugger or a coverage tool has the interpreter's ear."""
        if sys.gettrace() is not None:
            return False
        self._frame.f_trace = self._line
        sys.settrace(self._call)
        self._on = True
        return True

    def stop(self) -> None:
        if self._on:
            sys.settrace(None)
            self._frame.f_trace = None
            self._on = False
            # Before Python 3.13 tracing leaves a copy of a function's variables, which would keep the batch alive.
            _ = self._frame.f_locals

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not is_users(frame.f_code.co_filename):
            return None
        self.lines.setdefault(frame.f_code, set()).add(frame.f_lineno)
        return self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines.setdefault(frame.f_code, set()).add(frame.f_lineno)
        return self._line


def unseen_use(run: LinesRun, frame: FrameType, losses: Collection[str] = ()) -> str | None:
    """The first place that may yet use a batch, in words; None where there is none.

    ``losses`` are names whose value is the whole batch's, beside those that ``backward`` is called on.
    """
    tree = _tree(frame.f_code.co_filename)
    if tree is None:
        return "its source is not to be had"
    loop = _loop_at(tree, frame.f_lineno)
    if loop is None:
        return "the loop is not in its source"
    held = _holding_the_batch(loop, set(losses) | _called_backward(loop))
    for statement in _not_run(loop.body, run.lines[frame.f_code]):
        if used := held & _names_in(statement):
            return f"line {statement.lineno}, which has not run yet, uses {min(used)}"
    if found := _used_after(tree, loop, held):
        return f"line {found[0]}, after the loop, uses {found[1]}"
    return _unseen_below(run, frame.f_code)


def _unseen_below(run: LinesRun, own: CodeType) -> str | None:
    """Functions that the loop calls: what they have not done may read only what has no number in it."""
    for code, lines in run.lines.items():
        if code is own or (tree := _tree(code.co_filename)) is None:
            continue
        for node in ast.walk(tree):
            # A comprehension has code of its own, and runs none of the lines around it.
            if isinstance(node, ast.FunctionDef) and node.name == code.co_name and _begins(node) == code.co_firstlineno:
                for statement in _not_run(node.body, lines):
                    if _READS & _names_in(statement):
                        return f"line {statement.lineno} of {node.name}, which has not run yet, may read numbers"
    return None


def _begins(function: ast.FunctionDef) -> int:
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])


def _tree(filename: str) -> ast.Module | None:
    return _parsed("".join(linecache.getlines(filename)))


@functools.lru_cache(maxsize=64)  # asked for each function that a loop runs, and at each loop
def _parsed(source: str) -> ast.Module | None:
    source = re.sub(r"\A\s*%%[^\n]*", lambda magic: "\n" * magic.group().count("\n"), source)
    try:
        return ast.parse(source) if source.strip() else None
    except (SyntaxError, ValueError):
        return None


def _loop_at(tree: ast.Module, line: int) -> ast.For | ast.While | None:
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For | ast.While) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return max(around, key=lambda node: node.lineno, default=None)


def _holding_the_batch(loop: ast.For | ast.While, losses: set[str]) -> set[str]:
    """Names that the loop binds to the batch, or to what is made of such."""
    held = _bound_by(_without_number(loop)) if isinstance(loop, ast.For) else set[str]()
    grown = -1
    while grown != len(held):
        grown = len(held)
        for node in ast.walk(loop):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                used = _names_in(node.value)
                if held & used or "next" in used:
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    held |= set().union(*map(_bound_by, targets)) - losses
    return held


def _without_number(loop: ast.For) -> ast.expr:
    """The target of a loop; of ``for number, (x, y) in enumerate(loader)`` what the loader gives."""
    called = loop.iter.func if isinstance(loop.iter, ast.Call) else None
    counted = isinstance(called, ast.Name) and called.id == "enumerate"
    if counted and isinstance(loop.target, ast.Tuple) and len(loop.target.elts) == 2:
        return loop.target.elts[1]
    return loop.target


def _bound_by(target: ast.AST) -> set[str]:
    return {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}


def _called_backward(loop: ast.stmt) -> set[str]:
    """``loss`` of ``loss.backward()``, ``scaler.scale(loss).backward()`` and ``fabric.backward(loss)``."""
    found: set[str] = set()
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward":
            for part in (node.func.value, *node.args):
                if isinstance(part, ast.Name):
                    found.add(part.id)
                elif isinstance(part, ast.Call):
                    found |= {one.id for one in part.args if isinstance(one, ast.Name)}
    return found


def _not_run(body: Iterable[ast.stmt], lines: Collection[int]) -> Iterator[ast.stmt]:
    """The outermost statements of which nothing has run."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.Pass | ast.Global | ast.Nonlocal):
            continue
        if not any(line in lines for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)):
            if not _is_text(statement):
                yield statement
            continue
        for part in ("body", "orelse", "finalbody"):
            yield from _not_run(getattr(statement, part, []), lines)
        for handler in getattr(statement, "handlers", []):
            yield from _not_run(handler.body, lines)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _used_after(tree: ast.Module, loop: ast.stmt, held: set[str]) -> tuple[int, str] | None:
    """A later use of one of the names, unless it is bound anew before."""
    live = set(held)
    for body in _bodies_around(tree, loop):
        position = next((i for i, one in enumerate(body) if loop in ast.walk(one)), None)
        for statement in body[(position or 0) + 1 :] if position is not None else []:
            if found := _use_in(statement, live):
                return found
    return None


def _bodies_around(tree: ast.Module, loop: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Statement lists that contain the loop, from the innermost to its function or the cell."""
    found: list[list[ast.stmt]] = []

    def descend(node: ast.AST) -> None:
        for part in ("body", "orelse", "finalbody"):
            body = getattr(node, part, None)
            if isinstance(body, list) and any(loop in ast.walk(one) for one in body):
                if isinstance(node, ast.FunctionDef):
                    found.clear()
                found.append(body)
                for one in body:
                    if one is not loop and loop in ast.walk(one):
                        descend(one)

    descend(tree)
    yield from reversed(found)


def _use_in(statement: ast.stmt, live: set[str]) -> tuple[int, str] | None:
    """Names are dropped from ``live`` where they are bound to something else."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return None
    if isinstance(statement, ast.For):
        if used := live & _names_in(statement.iter):
            return statement.lineno, min(used)
        bound = _bound_by(statement.target)
        inner = live - bound
        for one in statement.body:
            if found := _use_in(one, inner):
                return found
        live -= bound
        return None
    if isinstance(statement, ast.With | ast.If | ast.While | ast.Try):
        heads = [*getattr(statement, "items", []), *([statement.test] if hasattr(statement, "test") else [])]
        for head in heads:
            if used := live & _names_in(head):
                return statement.lineno, min(used)
        for part in ("body", "orelse", "finalbody"):
            for one in getattr(statement, part, []):
                if found := _use_in(one, live):
                    return found
        return None
    value = getattr(statement, "value", None)
    if isinstance(statement, ast.Assign) and value is not None and not live & _names_in(value):
        live -= set().union(*map(_bound_by, statement.targets))
        return None
    if used := live & _names_in(statement):
        return statement.lineno, min(used)
    return None


def _names_in(node: ast.AST) -> set[str]:
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return names | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
