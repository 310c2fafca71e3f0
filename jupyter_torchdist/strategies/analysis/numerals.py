"""The origin of a number in the arithmetic: a literal in the source, or the size of a tensor."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from types import FrameType
from typing import TypeGuard

import torch

from ...usercode.frames import NOWHERE, OURS
from .bindings import running, sources, value_of
from .lattice import Place, Rows

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OPERATORS = os.path.join(_TORCH, "_tensor.py")
_OVERRIDES = os.path.join(_TORCH, "overrides.py")


class Origin(Enum):
    LITERAL = "written in the source"
    SIZE = "taken from a tensor's size"
    OPEN = "not to be told"


def user_place() -> Place | None:
    """The innermost frame outside torch and this package."""
    frame = _frame(skip=(_TORCH, OURS, NOWHERE))
    return None if frame is None else Place(frame.f_code.co_filename, frame.f_lineno)


def asking() -> FrameType | None:
    """The frame that reads a number; a frame of torch if torch itself reads it."""
    return _frame(skip=(OURS, NOWHERE, _OPERATORS, _OVERRIDES))


@dataclass(frozen=True)
class Scene:
    """Where a number is used. ``rows``: tells the rows of a tensor; None if it has none."""

    frame: FrameType
    value: float
    rows: Callable[[torch.Tensor], Rows | None]


def origin(value: float, rows: Callable[[torch.Tensor], Rows | None]) -> Origin:
    """The origin of ``value``, or of its reciprocal, in the source of the running operation."""
    frame = _frame(
        skip=(
            OURS,
            NOWHERE,
            _OPERATORS,
            os.path.join(_TORCH, "_dynamo"),
            _OVERRIDES,
            os.path.join(_TORCH, "_compile"),
        )
    )
    if frame is None:
        return Origin.OPEN
    expression = running(frame)
    return Origin.OPEN if expression is None else _origin(expression, Scene(frame, value, rows))


def _frame(skip: tuple[str, ...]) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*skip, "<frozen")):
        frame = frame.f_back
    return frame


def _origin(tree: ast.AST, scene: Scene) -> Origin:
    if any(isinstance(node, ast.Call) and _is_attribute(node.func, "chunk") for node in ast.walk(tree)):
        return Origin.SIZE  # a fraction of it
    factors = list(_factors(tree)) or [tree]
    if any(_is_literal(node, scene.value) for factor in factors for node in ast.walk(factor)):
        return Origin.LITERAL
    for factor in factors:
        given = [(factor, scene.frame)]
        if isinstance(factor, ast.Name):
            given = sources(factor.id, scene.frame)
            if given and all(_is_literal(node, scene.value) for node, _ in given):
                return Origin.LITERAL
        found = {
            origin for node, frame in given for origin in _sizes(node, replace(scene, frame=frame)) or [Origin.OPEN]
        }
        if found in ({Origin.SIZE}, {Origin.LITERAL}):
            return found.pop()
        if Origin.SIZE in found and Origin.OPEN not in found:  # ``B * T``
            return Origin.SIZE
    return Origin.OPEN


def _factors(tree: ast.AST) -> Iterator[ast.AST]:
    """The operands of the running multiplication or division, or the arguments of the running call."""
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
    """For each size that an expression reads: the number of samples, another size, or unknown."""
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
    tensor = value_of(holder, scene.frame)
    return Origin.SIZE if isinstance(tensor, torch.Tensor) and scene.rows(tensor) is not None else Origin.OPEN


def _of_dim(holder: ast.AST, index: ast.AST, scene: Scene) -> Origin:
    tensor, dim = value_of(holder, scene.frame), value_of(index, scene.frame)
    if not isinstance(tensor, torch.Tensor) or not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        return Origin.SIZE if dim == 0 and not isinstance(tensor, (list, tuple, dict, str)) else Origin.OPEN
    rows = scene.rows(tensor)
    if rows is None:
        return Origin.OPEN  # the name may refer to another tensor by now
    return Origin.SIZE if dim % tensor.dim() == rows.dim else Origin.LITERAL


def _is_attribute(node: ast.AST, *names: str) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and node.attr in names
