"""Finds lines of the cell that will read numbers from parameters, which a pipeline has on other ranks."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ...protocol.errors import StrategyError
from ...usercode.frames import users_frame
from ...usercode.positions import tree_of

_READS = frozenset({"item", "tolist", "numpy", "nonzero", "argwhere", "masked_select", "unique"})
"""Functions and methods whose result, or its shape, depends on values."""
_BUILTINS = frozenset({"float", "int", "bool"})
_OTHER = frozenset({"grad", "shape", "dtype", "device", "requires_grad", "ndim", "size", "numel", "dim"})
"""Attributes of a parameter that are no values of it; gradients are told when they are read."""


def check(root: nn.Module) -> None:
    """Raise ``StrategyError`` if the code that is running now reads parameters of ``root`` in a line still to come."""
    frame = users_frame(sys._getframe(1))
    tree = None if frame is None else tree_of(frame.f_code.co_filename)
    if frame is None or tree is None:
        return
    names = {**frame.f_globals, **frame.f_locals}
    parameters = _Parameters(root, names)
    for body in _to_come(tree, frame.f_lineno):
        parameters.enter(body)
        for node in ast.walk(body):
            if isinstance(node, ast.Call) and any(map(parameters.are_in, _read_by(node))):
                raise StrategyError(
                    f"line {node.lineno} reads numbers from parameters of {type(root).__name__}, of which each rank of "
                    "a pipeline has only its own",
                    "use --strategy ddp or fsdp, where every rank has what the cell reads",
                )


def _to_come(tree: ast.Module, line: int) -> Iterator[ast.stmt]:
    """The outermost statements from the one in ``line`` on: in a loop also the lines before it."""
    for body in [tree.body, *(one.body for one in ast.walk(tree) if isinstance(one, ast.FunctionDef))]:
        if body and body[0].lineno <= line <= (body[-1].end_lineno or line):
            for one in body:
                if (one.end_lineno or one.lineno) >= line and not isinstance(one, ast.FunctionDef | ast.ClassDef):
                    yield one


def _read_by(call: ast.Call) -> Iterator[ast.expr]:
    """The expressions whose numbers a call reads."""
    if isinstance(call.func, ast.Attribute) and call.func.attr in _READS:
        yield from (call.func.value, *call.args)
    elif isinstance(call.func, ast.Name) and call.func.id in _BUILTINS:
        yield from call.args


class _Parameters:
    """Which expressions are parameters of ``root``."""

    def __init__(self, root: nn.Module, names: Mapping[str, Any]) -> None:
        self._names = names
        self._modules = set(root.modules())
        self._parameters = set(map(id, root.parameters()))
        self._loops: set[str] = set()
        """Variables of loops over the parameters."""

    def enter(self, body: ast.AST) -> None:
        """Note the variables of loops over ``model.parameters()`` in ``body``."""
        for node in ast.walk(body):
            if isinstance(node, ast.For | ast.comprehension) and self._lists(node.iter):
                self._loops |= {one.id for one in ast.walk(node.target) if isinstance(one, ast.Name)}

    def are_in(self, node: ast.AST) -> bool:
        """Whether a parameter is a part of an expression, as more than its gradient or its shape."""
        if isinstance(node, ast.Attribute) and node.attr in _OTHER:
            return False
        if isinstance(node, ast.Name) and node.id in self._loops:
            return True
        if isinstance(node, ast.Attribute) and id(self._value(node)) in self._parameters:
            return True
        return any(map(self.are_in, ast.iter_child_nodes(node)))

    def _lists(self, node: ast.AST) -> bool:
        """Whether ``model.parameters()`` or ``model.named_parameters()`` is in an expression."""
        return any(
            isinstance(one, ast.Attribute)
            and one.attr in ("parameters", "named_parameters")
            and isinstance(owner := self._value(one.value), nn.Module)
            and owner in self._modules
            for one in ast.walk(node)
        )

    def _value(self, node: ast.AST) -> Any:
        """The object that a name, an attribute of a module or an element of a module is; None for anything else."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        owner: Any
        if isinstance(node, ast.Attribute):
            owner = self._value(node.value)
            return getattr(owner, node.attr, None) if isinstance(owner, nn.Module) else None
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            owner = self._value(node.value)
            if isinstance(owner, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
                element: Any = node.slice.value
                try:
                    return owner[element]
                except (IndexError, KeyError, TypeError):
                    return None
        return None
