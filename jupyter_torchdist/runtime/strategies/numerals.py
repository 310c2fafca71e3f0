"""Where a number in the arithmetic comes from: written in the source, or taken from a size?"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import FrameType
from typing import Any, TypeGuard

import torch

from .lattice import Place, Rows

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


@dataclass(frozen=True)
class Scene:
    """Where a number is used. ``rows``: where a tensor has its samples, None where it has none."""

    frame: FrameType
    value: float
    rows: Callable[[torch.Tensor], Rows | None]


def origin(value: float, rows: Callable[[torch.Tensor], Rows | None]) -> Origin:
    """How the source of the running operation came by ``value``, or its reciprocal."""
    frame = _frame(
        skip=(
            _HERE,
            _OPERATORS,
            os.path.join(_TORCH, "_dynamo"),
            os.path.join(_TORCH, "overrides.py"),
            os.path.join(_TORCH, "_compile"),
        )
    )
    if frame is None:
        return Origin.OPEN
    expression = _running(frame)
    return Origin.OPEN if expression is None else _origin(expression, Scene(frame, value, rows))


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
            text = _cut(lines, *span)  # none of them is None
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


def _origin(tree: ast.AST, scene: Scene) -> Origin:
    if any(isinstance(node, ast.Call) and _is_attribute(node.func, "chunk") for node in ast.walk(tree)):
        return Origin.SIZE  # a fraction of it
    factors = list(_factors(tree)) or [tree]
    if any(_is_literal(node, scene.value) for factor in factors for node in ast.walk(factor)):
        return Origin.LITERAL
    for factor in factors:
        sources = [factor]
        if isinstance(factor, ast.Name):
            sources = _assigned(scene.frame.f_code.co_filename, factor.id)
            if sources and all(_is_literal(node, scene.value) for node in sources):
                return Origin.LITERAL
        found = {origin for source in sources for origin in _sizes(source, scene) or [Origin.OPEN]}
        if found in ({Origin.SIZE}, {Origin.LITERAL}):
            return found.pop()
        if Origin.SIZE in found and Origin.OPEN not in found:  # ``B * T``
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
            yield from (*node.args, *(keyword.value for keyword in node.keywords))
            return
        if isinstance(node, ast.Subscript):
            yield from (part for part in ast.walk(node.slice) if isinstance(part, ast.Call | ast.Name | ast.Constant))
            return


def _is_literal(node: ast.AST, value: float) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float))
        and node.value != 0
        and (node.value == value or 1 / node.value == value)
    )


def _sizes(node: ast.AST, scene: Scene) -> list[Origin]:
    """Of each size that an expression reads: the samples', another, or not to be told."""
    return [found for part in ast.walk(node) if (found := _size(part, scene)) is not None]


def _size(node: ast.AST, scene: Scene) -> Origin | None:
    if isinstance(node, ast.Subscript):
        source = node.value.func if isinstance(node.value, ast.Call) else node.value
        return _of_dim(source.value, node.slice, scene) if _is_attribute(source, "shape", "size") else None
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Name) and node.func.id == "len" and node.args:
        return _of_dim(node.args[0], ast.Constant(0), scene)
    if _is_attribute(node.func, "size"):
        return _of_dim(node.func.value, node.args[0], scene) if node.args else None
    return _of_all(node.func.value, scene) if _is_attribute(node.func, "numel", "nelement") else None


def _of_all(holder: ast.AST, scene: Scene) -> Origin:
    tensor = _value(holder, scene.frame)
    return Origin.SIZE if isinstance(tensor, torch.Tensor) and scene.rows(tensor) is not None else Origin.OPEN


def _of_dim(holder: ast.AST, index: ast.AST, scene: Scene) -> Origin:
    tensor, dim = _value(holder, scene.frame), _value(index, scene.frame)
    if not isinstance(tensor, torch.Tensor) or not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        return Origin.SIZE if dim == 0 and not isinstance(tensor, (list, tuple, dict, str)) else Origin.OPEN
    rows = scene.rows(tensor)
    if rows is None:
        return Origin.OPEN  # the name may stand for another tensor by now
    return Origin.SIZE if dim % tensor.dim() == rows.dim else Origin.LITERAL


def _value(node: ast.AST, frame: FrameType) -> Any:
    """What a name, an attribute or an item stands for, found without running anything of the user's."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        return -node.operand.value if isinstance(node.operand.value, int) else None
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, frame), "__dict__", {}).get(node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        holder = _value(node.value, frame)
        if type(holder) is dict:
            return holder.get(node.slice.value)
        if type(holder) in (list, tuple) and isinstance(node.slice.value, int):
            return dict(enumerate(holder)).get(node.slice.value)
    return None


def _is_attribute(node: ast.AST, *names: str) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and node.attr in names


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
