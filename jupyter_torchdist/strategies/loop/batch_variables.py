"""Which variables hold a batch, or a value that was computed from it.

Variables are followed by name in their scopes, attributes by name only (``self.out`` and ``state.out`` are the same).
A name that is wrongly taken for the batch costs speed, but never a wrong result.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from types import CodeType
from typing import cast

from ...usercode.positions import tree_of
from ...usercode.source import (
    Block,
    Comprehension,
    Function,
    Key,
    Scopes,
    called_name,
    functions_of,
    names_bound_at,
    names_in,
)
from .line_tracer import LinesRun

_STORES = frozenset({
    "add", "append", "appendleft", "extend", "extendleft", "feed", "insert", "log", "push", "put", "put_nowait",
    "record", "send", "set", "setdefault", "store", "update", "write", "__setitem__",
})  # fmt: skip
"""Methods that store their arguments in the object that they are called on, beside those of a tensor (``add_``)."""
_LIBRARIES = frozenset({"torch", "nn", "F", "functional"})
"""``torch.relu_(x)`` writes to its argument."""
_COUNTS = frozenset({"range", "trange", "count"})


def _stores(called: ast.Attribute) -> bool:
    in_place = called.attr.endswith("_") and not called.attr.startswith("_")
    return called.attr in _STORES or (in_place and _name_in(called.value) not in _LIBRARIES)


def _name_in(value: ast.expr) -> str:
    """``nn`` in ``nn.init``; empty for other expressions."""
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""


def _without_number(loop: ast.For | ast.AsyncFor | ast.comprehension) -> ast.expr:
    """The target of a loop. For ``for number, (x, y) in tqdm(enumerate(loader))`` it is ``(x, y)``."""
    called = loop.iter
    while isinstance(called, ast.Call) and called_name(called) == "tqdm" and called.args:
        called = called.args[0]
    counted = isinstance(called, ast.Call) and called_name(called) == "enumerate"
    if counted and isinstance(loop.target, ast.Tuple) and len(loop.target.elts) == 2:
        return loop.target.elts[1]
    return loop.target


class Holding:
    """Which variables of a loop, and of the functions that it calls, hold the batch."""

    def __init__(self, scopes: Scopes, loop: ast.For | ast.While, run: LinesRun, own: CodeType) -> None:
        self._scopes, self._loop, self._own = scopes, loop, scopes.around[loop]
        self._lines = run.lines[own]
        self._ran: dict[Function, set[int]] = {}
        self._watched: set[Function] = set()
        self._held: set[Key] = set()
        self._parts: set[Key] = set()
        """Objects with attributes that hold the batch; the attributes are found by name."""
        self._kept: dict[Key, int] = {}
        """Containers that hold the batch, and the line that stored it there."""
        self._events: dict[Key, dict[tuple[int, int, int], bool]] = {}
        """Where a variable gets another value of a batch, and (True) where ``backward`` makes it the global value."""
        self._giving: set[Function] = set()
        for code in (*run.lines, *run.aside):
            for tree in scopes.trees if code is not own else []:
                for function in functions_of(tree, code) if tree_of(code.co_filename) is tree else []:
                    self._ran.setdefault(function, set()).update(run.lines.get(code, ()))
                    if code in run.lines:
                        self._watched.add(function)
                        self._held |= {(id(function), name) for name in run.given.get(code, ())}
        if isinstance(loop, ast.For) and not (isinstance(loop.iter, ast.Call) and called_name(loop.iter) in _COUNTS):
            self._bind(_without_number(loop), loop.iter)
        self._rebound = {
            self._scopes.key(name, self._scopes.around[one])
            for body in (self._loop, *self._watched)
            for one in ast.walk(body)
            for name in (() if isinstance(one, Block) else names_bound_at(one))
        }
        """Variables that may refer to another function in each step."""
        self._grow()

    def _grow(self) -> None:
        """Find all variables that are bound to the batch, or to values computed from such variables."""
        bodies = [self._loop, *self._watched]
        for node in (one for body in bodies for one in ast.walk(body)):
            if isinstance(node, ast.Call) and called_name(node) == "backward":
                for _, key in self._losses(node):
                    self._events.setdefault(key, {})[self._place(node)] = True
        before: object = None
        while before != (before := self._size()):
            for node in (one for body in bodies for one in ast.walk(body)):
                self._follow(node)

    def _size(self) -> tuple[int, ...]:
        return len(self._held), len(self._parts), len(self._giving), sum(map(len, self._events.values()))

    def _follow(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if node.value is not None and (self._holds(node.value) or self._is_placed(target)):
                    self._bind(target, node)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            if node is not self._loop and self._holds(node.iter):
                self._bind(_without_number(node), node.iter)
        elif isinstance(node, ast.withitem):
            if node.optional_vars is not None and self._holds(node.context_expr):
                self._bind(node.optional_vars, node.context_expr)
        elif isinstance(node, ast.Match):
            if self._holds(node.subject):
                patterns = (one for case in node.cases for one in ast.walk(case.pattern))
                for name in set().union(*map(names_bound_at, patterns)):
                    self._held.add(self._scopes.key(name, self._scopes.around[node]))
        elif isinstance(node, ast.Call):
            self._follow_call(node)
        elif isinstance(node, ast.Return | ast.Yield | ast.YieldFrom):
            function = self._scopes.around[node]
            if function is not None and node.value is not None and self._holds(node.value):
                self._giving.add(function)
        elif isinstance(node, ast.Lambda) and self._holds(node.body):
            self._giving.add(node)

    def _follow_call(self, node: ast.Call) -> None:
        given = [*node.args, *(one.value for one in node.keywords)]
        if isinstance(node.func, ast.Attribute) and _stores(node.func) and any(map(self._holds, given)):
            self._keep(node.func.value, node)
        elif isinstance(node.func, ast.Name) and node.func.id == "setattr" and any(map(self._holds, given)):
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                self._held.add((0, f".{name.value}"))
            else:
                self._keep(node.args[0], node)

    def _losses(self, node: ast.Call) -> Iterator[tuple[ast.expr, Key]]:
        """``loss`` of ``loss.backward()``, ``scaler.scale(loss).backward()`` and ``fabric.backward(loss)``."""
        for part in (node.func.value, *node.args) if isinstance(node.func, ast.Attribute) else ():
            scaled = isinstance(part, ast.Call) and called_name(part) == "scale"
            for one in part.args if scaled and isinstance(part, ast.Call) else [part]:
                if (key := self._key(one)) is not None:
                    yield one, key

    def _is_shown_beside(self, key: Key, call: ast.Call) -> bool:
        """``scaler.scale(loss).backward() if scaler else loss.backward()``: the call that ran counts for both."""
        events = self._events.get(key, {})
        return any(shown and place != self._place(call) for place, shown in events.items())

    def _bind(self, target: ast.AST, at: ast.expr | ast.stmt) -> None:
        if isinstance(target, ast.Name | ast.Attribute):
            key = self._key(target)
            assert key is not None
            self._held.add(key)
            self._events.setdefault(key, {})[self._place(at)] = False
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                self._parts.add(self._scopes.key(target.value.id, self._scopes.around[target]))
        elif isinstance(target, ast.Subscript):
            self._keep(target.value, at)
        elif isinstance(target, ast.Tuple | ast.List | ast.Starred):
            for one in target.elts if not isinstance(target, ast.Starred) else [target.value]:
                self._bind(one, at)

    def _is_placed(self, target: ast.expr) -> bool:
        """``counts[label] += 1``: whether the batch chooses where something is stored."""
        return any(isinstance(one, ast.Subscript) and self._holds(one.slice) for one in ast.walk(target))

    def _keep(self, container: ast.expr, at: ast.expr | ast.stmt) -> None:
        """The batch is stored in ``last``, ``state["a"]`` or ``self.last``."""
        while isinstance(container, ast.Subscript):
            container = container.value
        if isinstance(container, ast.Attribute) and isinstance(container.value, ast.Name):
            self._parts.add(self._scopes.key(container.value.id, self._scopes.around[container]))
        if (key := self._key(container)) is not None:
            self._held.add(key)
            self._kept[key] = at.lineno

    def _key(self, node: ast.AST) -> Key | None:
        if isinstance(node, ast.Name):
            return self._scopes.key(node.id, self._scopes.around[node])
        return (0, f".{node.attr}") if isinstance(node, ast.Attribute) else None

    def _place(self, node: ast.expr | ast.stmt) -> tuple[int, int, int]:
        return id(self._scopes.around[node]), node.end_lineno or node.lineno, node.end_col_offset or 0

    def _holds(self, node: ast.expr) -> bool:
        """Whether the value of ``node`` may hold the batch: also for ``next(batches)`` and for watched functions."""
        return any(True for _ in self._uses(node, value=True))

    def _uses(
        self, node: ast.AST, among: Collection[Key] | None = None, *, value: bool = False
    ) -> Iterator[tuple[int, str]]:
        """Lines and names of uses. ``value``: only uses that the value of the expression may depend on."""
        below: list[ast.AST] = [node]
        losses: set[ast.expr] = set()
        while below:
            one = below.pop()
            if isinstance(one, Block) or one in losses:
                continue
            if isinstance(one, Comprehension) and value is False:
                yield from self._uses_within(one, among)
                continue
            if isinstance(one, ast.Call) and called_name(one) == "backward":
                losses |= {loss for loss, key in self._losses(one) if self._is_shown_beside(key, one)}
            key = self._key(one)
            if isinstance(one, ast.Name | ast.Attribute) and key is not None:
                live = key in among if among is not None else key in self._held or key in self._parts
                if live and not self._shown(one, key):
                    yield one.lineno, key[1].lstrip(".")
                base = self._key(one.value) if isinstance(one, ast.Attribute) else None
                if isinstance(base, tuple) and base in self._parts and base not in self._held:
                    continue  # another attribute of an object in _parts
            if value and isinstance(one, ast.Call):
                if isinstance(one.func, ast.Name) and one.func.id == "next":
                    yield one.lineno, "next"
                called = self._scopes.named(one.func)
                if self._giving.intersection(called):
                    yield one.lineno, called_name(one)
                of_self = isinstance(one.func, ast.Attribute) and names_in(one.func.value) == {"self"}
                if called and self._watched.issuperset(called) and (of_self or isinstance(one.func, ast.Name)):
                    continue
            below += ast.iter_child_nodes(one)

    def _uses_within(self, one: Comprehension, among: Collection[Key] | None) -> Iterator[tuple[int, str]]:
        """As ``_uses``: the names that a comprehension binds are its own. A loader in it gives other batches."""
        own = {
            self._scopes.key(name.id, self._scopes.around[name])
            for part in one.generators
            for name in ast.walk(part.target)
            if isinstance(name, ast.Name)
        }
        first = one.generators[0].iter
        yield from self._uses(first, among)
        bound = any(True for _ in self._uses(first, among, value=True))
        live = set(self._held | self._parts if among is None else among) - (set() if bound else own)
        for part in ast.iter_child_nodes(one):
            for below in ast.iter_child_nodes(part) if part is one.generators[0] else [part]:
                if below is not first:
                    yield from self._uses(below, live)

    def _judged_later(self, node: ast.AST) -> list[ast.AST]:
        """In ``loss = loss / steps`` and ``loss += penalty()`` the loss itself is judged at ``backward``."""
        if isinstance(node, ast.AugAssign):
            target, below = cast(ast.expr, node.target), [node.value]
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.value, ast.BinOp):
            target, below = node.targets[0], [node.value]
        else:
            return [node]
        key, others = self._key(target), list[ast.AST]()
        if not isinstance(target, ast.Name) or key is None or not any(self._events.get(key, {}).values()):
            return [node]
        while below:
            one = below.pop()
            if isinstance(one, ast.BinOp):
                below += [one.left, one.right]
            elif self._key(one) != key:
                others.append(one)
        return others

    def _first(self, node: ast.AST, among: Collection[Key] | None = None) -> tuple[int, str] | None:
        return min(self._uses(node, among), default=None)

    def _shown(self, node: ast.Name | ast.Attribute, key: Key) -> bool:
        """Whether the variable has the global batch's value here: the last event was a ``backward`` on it."""
        function = id(self._scopes.around[node])
        events = sorted(
            (place[1:], shown) for place, shown in self._events.get(key, {}).items() if place[0] == function
        )
        before = [shown for place, shown in events if place <= (node.lineno, node.col_offset)]
        if not before and function == id(self._own):  # the value of the previous step
            before = [shown for _, shown in events]
        return bool(before) and before[-1]
