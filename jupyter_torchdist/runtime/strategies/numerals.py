"""Where a number in the arithmetic comes from: written in the source, or taken from a size?"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from enum import Enum
from types import FrameType

import torch

from .lattice import Place

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_OPERATORS = os.path.join(_TORCH, "_tensor.py")


class Origin(Enum):
    LITERAL = "written in the source"
    SIZE = "taken from a tensor's size"
    OPEN = "not to be told"


def user_place() -> Place | None:
    """The innermost frame outside torch and this package."""
    frame = _frame(skip=(_TORCH, _HERE))
    return None if frame is None else Place(frame.f_code.co_filename, frame.f_lineno)


def origin(value: float) -> Origin:
    """How the source of the running operation came by ``value``, or its reciprocal."""
    frame = _frame(skip=(_HERE, _OPERATORS, os.path.join(_TORCH, "_dynamo"), os.path.join(_TORCH, "_compile")))
    if frame is None:
        return Origin.OPEN
    expression = _running(frame)
    return Origin.OPEN if expression is None else _origin(expression, value, frame)


def _frame(skip: tuple[str, ...]) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*skip, "<frozen")):
        frame = frame.f_back
    return frame


def _running(frame: FrameType) -> ast.AST | None:
    """The expression or statement that ``frame`` is at; the whole line before Python 3.11."""
    lines = linecache.getlines(frame.f_code.co_filename)
    if not 0 < frame.f_lineno <= len(lines):
        return None
    text = lines[frame.f_lineno - 1]
    if hasattr(frame.f_code, "co_positions"):
        span = list(frame.f_code.co_positions())[frame.f_lasti // 2]
        if None not in span:
            text = _cut(lines, *span)  # type: ignore[arg-type]  # none of them is None
    try:
        return ast.parse(textwrap.dedent(text).strip())
    except SyntaxError:
        return None


def _cut(lines: list[str], first: int, last: int, start: int, end: int) -> str:
    """Lines from the byte ``start`` of the first to the byte ``end`` of the last."""
    chosen = [line.encode() for line in lines[first - 1 : last]]
    chosen[-1] = chosen[-1][:end]
    chosen[0] = chosen[0][start:]
    joined = b"".join(chosen).decode(errors="replace")
    return f"({joined})" if len(chosen) > 1 and not re.search(r"^\s*\w[^=]*[^=!<>]=", joined) else joined


def _origin(tree: ast.AST, value: float, frame: FrameType) -> Origin:
    factors = list(_factors(tree)) or [tree]
    if any(_is_literal(node, value) for factor in factors for node in ast.walk(factor)):
        return Origin.LITERAL
    for factor in factors:
        if isinstance(factor, ast.Name):
            named = _assigned(frame.f_code.co_filename, factor.id)
            if named and all(_is_literal(node, value) for node in named):
                return Origin.LITERAL
            if named and all(_reads_size(node, frame) for node in named):
                return Origin.SIZE
        elif _reads_size(factor, frame):
            return Origin.SIZE
    return Origin.OPEN


def _factors(tree: ast.AST) -> Iterator[ast.AST]:
    """The operands of the running multiplication or division; of a call, what is given to it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp):
            yield node.right
            if isinstance(node.op, ast.Mult):
                yield node.left
            return
        if isinstance(node, ast.AugAssign):
            yield node.value
            return
        if isinstance(node, ast.Call):
            yield from node.args
            return


def _is_literal(node: ast.AST, value: float) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float))
        and node.value != 0
        and (node.value == value or 1 / node.value == value)
    )


def _reads_size(node: ast.AST, frame: FrameType) -> bool:
    """Whether a number is the size of a first dimension, or of all."""
    return any(_is_size(part, frame) for part in ast.walk(node))


def _is_size(node: ast.AST, frame: FrameType) -> bool:
    if isinstance(node, ast.Subscript):
        source = node.value.func if isinstance(node.value, ast.Call) else node.value
        return _is_attribute(source, "shape", "size") and _is_zero(node.slice)
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name) and node.func.id == "len" and node.args:
        return isinstance(_value(node.args[0], frame), torch.Tensor)
    if _is_attribute(node.func, "size"):
        return bool(node.args) and _is_zero(node.args[0])
    return _is_attribute(node.func, "numel", "nelement")


def _value(node: ast.AST, frame: FrameType) -> object:
    """What a name, an attribute or an item stands for, found without running anything of the user's."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, frame), "__dict__", {}).get(node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        holder = _value(node.value, frame)
        if type(holder) is dict:
            return holder.get(node.slice.value)
        if type(holder) in (list, tuple) and isinstance(node.slice.value, int):
            return dict(enumerate(holder)).get(node.slice.value)  # type: ignore[call-overload]
    return None


def _is_attribute(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in names


def _is_zero(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0


def _assigned(filename: str, name: str) -> list[ast.AST]:
    """What the source binds ``name`` to; a name that is also bound in another way has no expression here."""
    found: list[ast.AST] = []
    for node in ast.walk(_tree(filename)):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == name:
                    found.append(node.value)
                elif isinstance(target, ast.Tuple) and name in (names := [getattr(e, "id", "") for e in target.elts]):
                    at = ast.Constant(names.index(name))
                    found.append(ast.Subscript(node.value, at, ast.Load()))  # of ``B, T = x.shape``, ``x.shape[0]``
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and isinstance(node.target, ast.Name):
            if node.target.id == name and node.value is not None:
                found.append(node.value)
        elif isinstance(node, (ast.For, ast.comprehension, ast.AugAssign)):
            if any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node.target)):
                return []
        elif isinstance(node, ast.arg) and node.arg == name:
            return []
    return found


@functools.lru_cache(maxsize=64)
def _parsed(source: str) -> ast.AST:
    try:
        return ast.parse(re.sub(r"\A%%[^\n]*", "", source))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _tree(filename: str) -> ast.AST:
    return _parsed("".join(linecache.getlines(filename)))
