"""Where in its source user code is, to the column: compiled code says so from Python 3.11 on.

Code of Python 3.10 knows its lines alone. There the source is compiled once more, with a line of its own for each
expression: what has become of it in the same place of the same bytecode is then known by its line.
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
    """The parsed source of a file or a cell; None where it has none, or none that can be parsed."""
    return _parsed("".join(linecache.getlines(filename)))


@functools.lru_cache(maxsize=64)  # asked for each function that a loop runs, and at each loop
def _parsed(source: str) -> ast.Module | None:
    source = re.sub(r"\A\s*%%[^\n]*", lambda magic: "\n" * magic.group().count("\n"), source)
    try:
        return ast.parse(source) if source.strip() else None
    except (SyntaxError, ValueError):
        return None


def span_of(node: ast.expr | ast.stmt) -> Span:
    return Span(node.lineno, node.end_lineno or node.lineno, node.col_offset, node.end_col_offset or 0)


def running(frame: FrameType) -> Span | None:
    """Of the operation that ``frame`` is at; None where that is not known."""
    if sys.version_info >= (3, 11):
        found = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,))
        return None if None in found else Span(found[0], *found[1:])
    numbered = _numbered_code(frame.f_code, frame.f_lineno, frame.f_lasti)
    return None if numbered is None else numbered.at(frame.f_lasti)


def extent(code: CodeType) -> Span | None:
    """From the first to the last of a function's operations."""
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
    """Code whose lines are numbers of expressions."""

    code: CodeType
    spans: dict[int, Span]

    def at(self, index: int) -> Span | None:
        lines = (line for begin, end, line in self.code.co_lines() if begin <= index < end)
        return self.spans.get(next(lines, None) or 0)

    def inside(self) -> list[Span]:
        lines = {line for _, _, line in self.code.co_lines()} - {self.code.co_firstlineno}
        return [self.spans[line] for line in lines if line in self.spans]


def _numbered_code(code: CodeType, line: int, index: int) -> _Numbered | None:
    """``code`` with the expressions at ``line`` numbered, the same as it is up to the instruction at ``index``."""
    source = "".join(linecache.getlines(code.co_filename))
    flags = code.co_flags & __future__.annotations.compiler_flag
    pairs, spans = _compiled(source, line, flags, code.co_name == "<module>")
    found = [numbered for plain, numbered in pairs if _same(plain, code, index) and _alike(plain, numbered, index)]
    return _Numbered(found[0], spans) if len(found) == 1 else None


def _same(plain: CodeType, code: CodeType, index: int) -> bool:
    """A cell's own code may differ at its end, where its value is kept."""
    return _alike(plain, code, index) if code.co_name == "<module>" else plain == code


def _alike(one: CodeType, other: CodeType, index: int) -> bool:
    """Lines have an influence on which jumps can be shortened; most code has none of these."""
    names = one.co_name == other.co_name and len(one.co_code) == len(other.co_code)
    return names and one.co_code[: index + 2] == other.co_code[: index + 2]


@functools.lru_cache(maxsize=256)  # a strategy asks again for each batch
def _compiled(
    source: str, line: int, flags: int, whole: bool
) -> tuple[list[tuple[CodeType, CodeType]], dict[int, Span]]:
    """All code around ``line`` (that of the file alone where not ``whole``), as it is and numbered."""
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
    for one in found:  # it grows meanwhile
        found += [constant for constant in one.co_consts if isinstance(constant, CodeType)]
    return found


def _number(tree: ast.Module, line: int, first: int) -> dict[int, Span]:
    """Give each expression of the statements at ``line`` a number for its line; what stands where."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and _contains(node, line)]
    nodes = [node for statement in statements for node in _expressions(statement)]
    spans = {number: span_of(node) for number, node in enumerate(nodes, first)}
    for number, node in zip(spans, nodes, strict=True):
        node.lineno = node.end_lineno = number
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node.func.end_lineno = node.lineno  # where the compiler puts the call of a method
    return spans


def _expressions(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Those that become an instruction, of one statement; f-strings tell wrong columns."""
    if isinstance(node, ast.AugAssign):
        yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt | ast.JoinedStr):
            if isinstance(child, ast.expr) and not isinstance(child, ast.BoolOp | ast.IfExp):
                yield child
            yield from _expressions(child)
