"""Positions of user code in its source, with columns: compiled code contains them from Python 3.11 on.

Code of Python 3.10 has line numbers only. There the source is compiled again with a different line number for each
expression. The line number at the same place of this bytecode then identifies the expression.
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import itertools
import linecache
import re
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import NamedTuple


class Span(NamedTuple):
    """A piece of a source; columns are counted in bytes."""

    line: int
    end_line: int
    column: int
    end_column: int

    @property
    def start(self) -> tuple[int, int]:
        return self.line, self.column

    @property
    def end(self) -> tuple[int, int]:
        return self.end_line, self.end_column


def tree_of(filename: str) -> ast.Module | None:
    """The parsed source of a file or a cell; None if there is no source or it cannot be parsed."""
    return _parsed("".join(linecache.getlines(filename)))


@functools.lru_cache(maxsize=64)  # called for each loop, and for each function that a loop runs
def _parsed(source: str) -> ast.Module | None:
    source = re.sub(r"\A\s*%%[^\n]*", lambda magic: "\n" * magic.group().count("\n"), source)
    try:
        return ast.parse(source) if source.strip() else None
    except (SyntaxError, ValueError):
        return None


def span_of(node: ast.expr | ast.stmt) -> Span:
    return Span(node.lineno, node.end_lineno or node.lineno, node.col_offset, node.end_col_offset or 0)


def running(frame: FrameType) -> Span | None:
    """The position of the operation that ``frame`` executes; None if it is unknown."""
    if sys.version_info >= (3, 11):
        found = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,))
        return None if None in found else Span(found[0], *found[1:])
    numbered = _numbered_code(frame.f_code, frame.f_lineno, frame.f_lasti)
    return None if numbered is None else numbered.at(frame.f_lasti)


def extent(code: CodeType) -> Span | None:
    """The span from the first to the last operation of a function."""
    if sys.version_info >= (3, 11):
        spans = [Span(one[0], *one[1:]) for one in code.co_positions() if None not in one and one[3]]
    else:
        numbered = _numbered_code(code, code.co_firstlineno, len(code.co_code))
        spans = [] if numbered is None else numbered.inside()
    if not spans:
        return None
    (line, column), (end_line, end_column) = min(one.start for one in spans), max(one.end for one in spans)
    return Span(line, end_line, column, end_column)


# ------------------------------------------------------------------------------------------------- Python 3.10


class _Numbered(NamedTuple):
    """Code whose line numbers are numbers of expressions."""

    code: CodeType
    spans: dict[int, Span]

    def at(self, index: int) -> Span | None:
        lines = (line for begin, end, line in self.code.co_lines() if begin <= index < end)
        return self.spans.get(next(lines, None) or 0)

    def inside(self) -> list[Span]:
        lines = {line for _, _, line in self.code.co_lines()} - {self.code.co_firstlineno}
        return [self.spans[line] for line in lines if line in self.spans]


def _numbered_code(code: CodeType, line: int, index: int) -> _Numbered | None:
    """``code`` with the expressions at ``line`` numbered; its bytecode is equal up to the instruction at ``index``."""
    source = "".join(linecache.getlines(code.co_filename))
    flags = code.co_flags & __future__.annotations.compiler_flag
    pairs, spans = _compiled(source, line, flags, code.co_name == "<module>")
    found = [numbered for plain, numbered in pairs if _same(plain, code, index) and _alike(plain, numbered, index)]
    return _Numbered(found[0], spans) if len(found) == 1 else None


def _same(plain: CodeType, code: CodeType, index: int) -> bool:
    """A cell's module code may differ at its end, where its value is stored."""
    return _alike(plain, code, index) if code.co_name == "<module>" else plain == code


def _alike(one: CodeType, other: CodeType, index: int) -> bool:
    """Compares only up to ``index``, because line numbers influence how the compiler shortens later jumps."""
    names = one.co_name == other.co_name and len(one.co_code) == len(other.co_code)
    return names and one.co_code[: index + 2] == other.co_code[: index + 2]


@functools.lru_cache(maxsize=256)  # a strategy calls it for each batch
def _compiled(
    source: str, line: int, flags: int, whole: bool
) -> tuple[list[tuple[CodeType, CodeType]], dict[int, Span]]:
    """Pairs of all code objects around ``line`` (in the complete file if ``whole``), unchanged and numbered."""
    tree = _parsed(source)
    around = [] if tree is None else [one for one in tree.body if whole or _contains(one, line)]
    part = ast.Module(copy.deepcopy(around), [])
    plain = _codes(part, flags)
    spans = _number(part, line, source.count("\n") + 2)
    numbered = _codes(part, flags)
    return (list(zip(plain, numbered, strict=True)) if len(plain) == len(numbered) else []), spans


def _contains(node: ast.stmt, line: int) -> bool:
    first: int = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
    return first <= line <= (node.end_lineno or node.lineno)


def _codes(tree: ast.Module, flags: int) -> list[CodeType]:
    code: CodeType = compile(tree, "", "exec", flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    found = [code]
    for one in found:  # the list grows during the loop
        found += [constant for constant in one.co_consts if isinstance(constant, CodeType)]
    return found


def _number(tree: ast.Module, line: int, first: int) -> dict[int, Span]:
    """Give each expression of the statements at ``line`` a number as its line. Returns number → span."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and _contains(node, line)]
    nodes = [node for statement in statements for node in _expressions(statement)]
    spans = {number: span_of(node) for number, node in enumerate(nodes, first)}
    for number, node in zip(spans, nodes, strict=True):
        node.lineno = node.end_lineno = number
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node.func.end_lineno = node.lineno  # the line that the compiler gives to a method call
    return spans


def _expressions(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """The expressions of one statement that become an instruction, without f-strings, whose columns are wrong."""
    if isinstance(node, ast.AugAssign):
        yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt | ast.JoinedStr):
            if isinstance(child, ast.expr) and not isinstance(child, ast.BoolOp | ast.IfExp):
                yield child
            yield from _expressions(child)
