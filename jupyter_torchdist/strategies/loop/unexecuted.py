"""What a loop may still do with a batch that it has not done in the watched steps.

A branch that was not taken (``if step % 100 == 0: print(accuracy(out, y))``) may read the batch later. So the lines
that run are recorded. Code that did not run is searched for variables that hold the batch: statements, arms of
expressions (``a if test else b``, ``test and a``), functions that only such code calls.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any

from ...usercode.frames import is_users
from ...usercode.positions import tree_of
from ...usercode.source import (
    Block,
    Function,
    Key,
    Scopes,
    arguments_of,
    bodies_around,
    called_name,
    functions_of,
    loop_at,
    name_of,
    names_in,
)
from .batch_variables import Holding
from .branches import arms, deletes_names, not_run, not_run_of
from .line_tracer import LinesRun

_READS = frozenset({"item", "tolist", "numpy", "size", "shape", "float", "int", "len", "print", "bool", "numel"})


def unseen_use(run: LinesRun, frame: FrameType) -> str | None:
    """A message on the first place that may still use a batch; None if there is none."""
    tree = tree_of(frame.f_code.co_filename)
    if tree is None:
        return "the source code of the loop cannot be read"
    loop = loop_at(tree, frame.f_lineno)
    if loop is None:
        return "the loop is not found in its source code"
    files = {code.co_filename for code in (*run.lines, *run.aside)} | _files_of(frame.f_globals)
    trees = [tree, *(one for file in sorted(files) if (one := tree_of(file)) is not None and one is not tree)]
    return _Search(Scopes(trees), loop, run, frame.f_code).found() or _read_below(run, frame.f_code)


def unchecked(run: LinesRun) -> list[str]:
    """A message for each part of a forward that waits for a number (a step, an epoch) and has not run."""
    found = []
    for code, lines in run.aside.items():
        tree = tree_of(code.co_filename)
        for node in functions_of(tree, code) if tree is not None else ():
            for test in (one for one in ast.walk(node) if isinstance(one, ast.If)):
                for arm in (test.body, test.orelse):
                    late = next(iter(not_run(arm, lines, test.test.end_lineno or 0 if arm is test.body else 0)), None)
                    if test.lineno in lines and isinstance(late, ast.stmt) and late is arm[0] and _waits(test.test):
                        found.append(
                            f"line {late.lineno} of {name_of(node)} has not run in the first steps, so it is not "
                            "checked that it treats each sample apart; -O model=whole computes the whole batch on "
                            "every rank"
                        )
    return found


def _catches(handler: ast.ExceptHandler) -> bool:
    """Whether it catches errors that an operation on a batch may raise."""
    return handler.type is None or not names_in(handler.type) <= {"KeyboardInterrupt", "StopIteration"}


def _waits(test: ast.expr) -> bool:
    """Whether a test compares a number, and no property of a tensor."""
    compared = [one for one in ast.walk(test) if isinstance(one, ast.Compare)]
    numbers = [
        one
        for part in compared
        for one in ast.walk(part)
        if isinstance(one, ast.Constant) and type(one.value) in (int, float)
    ]
    return bool(numbers) and not names_in(test) & _PROPERTIES


_PROPERTIES = frozenset({"dim", "ndim", "shape", "size", "numel", "dtype", "device", "training", "len", "isinstance"})


def _files_of(names: Mapping[str, Any]) -> set[str]:
    """The source files of the functions and classes that user code knows by these names."""
    found = set()
    for value in list(names.values()):
        owner = value if isinstance(value, (type, FunctionType)) else type(value)
        methods = [owner] if isinstance(owner, FunctionType) else list(vars(owner).values())
        code = next((one.__code__ for one in methods if isinstance(one, FunctionType)), None)
        if code is not None and is_users(code.co_filename):
            found.add(code.co_filename)
    return found


def _read_below(run: LinesRun, own: CodeType) -> str | None:
    """A message if code that has not run, in functions that the loop or its models call, may read numbers."""
    for code, lines in [*run.lines.items(), *run.aside.items()]:
        if code is own or (tree := tree_of(code.co_filename)) is None:
            continue
        for node in functions_of(tree, code):
            if isinstance(node, ast.Lambda):
                continue
            for statement in not_run(node.body, lines):
                if isinstance(statement, ast.stmt) and _READS & names_in(statement):
                    return f"line {statement.lineno} of {node.name}, which has not run yet, may read numbers"
    return None


class _Search(Holding):
    """Searches a loop, and what it calls, for code that has not run and uses the batch."""

    def found(self) -> str | None:
        for node in ast.walk(self._loop):
            if isinstance(node, ast.Yield | ast.YieldFrom) and self._scopes.around[node] is self._own:
                return f"line {node.lineno} gives the batch to another loop"
        for node in ast.walk(self._loop):
            if isinstance(node, ast.Try) and any(map(_catches, node.handlers)) and any(map(self._first, node.body)):
                return f"line {node.lineno} goes on after an error, which fewer samples may raise"
        if not self._held and "next" not in names_in(self._loop):
            return "the loop has no name for the batch"
        unrun = [*not_run(self._loop.body, self._lines, ran=self._ran), *arms(self._loop, self._ran)]
        for function in sorted(self._watched, key=lambda one: (one.lineno, one.col_offset)):
            unrun += not_run_of(function, self._ran)
        for node in (part for one in unrun for part in self._judged_later(one)):
            if used := self._first(node):
                return f"line {used[0]}, which has not run yet, uses {used[1]}"
        return self._used_aside() or self._used_in_reach(unrun) or self._used_after() or self._used_elsewhere()

    def _used_aside(self) -> str | None:
        """A use in the model's forward of a variable of the loop, which it does not get as an argument."""
        own = {key for key in self._held if key[0] in (0, id(self._own)) and not key[1].startswith(".")}
        for function in self._ran.keys() - self._watched - {self._own}:
            for node in function.body if not isinstance(function, ast.Lambda) else [function.body]:
                if used := self._first(node, own):
                    return f"line {used[0]} of {name_of(function)} uses {used[1]}, a variable of the loop"
        return None

    # ------------------------------------------------------------------------------------- who else may come to use it

    def _used_in_reach(self, unrun: Iterable[ast.AST]) -> str | None:
        """Uses in functions that have not run, but are named by code that has not run or may be called by the loop."""
        below: list[tuple[Function, bool]] = []
        for body in (self._loop, *self._watched):
            for node in ast.walk(body):
                if isinstance(node, ast.Call):
                    given = any(self._holds(one) for one in (*node.args, *(one.value for one in node.keywords)))
                    below += [(one, given) for one in self._callable_by(node)]
        for node in unrun:
            below += [(one, False) for one in self._named_in(node)]
        entered: set[tuple[Function, bool]] = set()
        while below:
            function, given = one = below.pop()
            if one in entered or function in self._ran or function is self._own:
                continue
            entered.add(one)
            if given:
                names = arguments_of(function)
                self._held |= {(id(function), name) for name in names - {"self", "cls"}}
            for node in function.body if not isinstance(function, ast.Lambda) else [function.body]:
                if isinstance(node, ast.Raise):
                    continue
                if used := self._first(node):
                    return f"line {used[0]} of {name_of(function)}, which has not run yet, uses {used[1]}"
                below += [(one, False) for one in self._named_in(node)]
        return None

    def _callable_by(self, call: ast.Call) -> list[Function]:
        """Functions found by name. ``table[k](y)``, or a variable that the loop binds, may call any function value."""
        scopes = self._scopes
        if isinstance(call.func, ast.Call) and called_name(call.func) == "getattr":
            return scopes.methods
        if isinstance(call.func, ast.Subscript | ast.IfExp | ast.BoolOp):
            return scopes.handed
        found = scopes.named(call.func)
        if not found and isinstance(call.func, ast.Name) and self._key(call.func) in self._rebound:
            return scopes.handed
        return found

    def _named_in(self, node: ast.AST) -> Iterator[Function]:
        for one in ast.walk(node):
            if isinstance(one, ast.Name | ast.Attribute):
                yield from self._scopes.named(one)
            elif isinstance(one, ast.Call):
                found = self._callable_by(one)
                yield from found or self._scopes.callables()

    def _used_after(self) -> str | None:
        """A later use of a variable, unless it is bound again before; in loops around it also from their top."""
        objects = {key for key in self._parts if key[1] not in ("self", "cls")}
        live = {key for key in self._held | objects if not self._settled(key)}
        bodies = bodies_around(self._scopes.trees[0], self._loop)
        for holder, body in [(self._loop, [*self._loop.body, *self._loop.orelse]), *bodies]:
            at = next((i for i, one in enumerate(body) if self._loop in ast.walk(one)), len(self._loop.body) - 1)
            again = isinstance(holder, ast.For | ast.While) and holder is not self._loop
            branches = [(body[at + 1 :], live)]
            for rest, branch in branches:
                for statement in rest:
                    if found := self._use_in(statement, branch):
                        return f"line {found[0]}, after the loop, uses {found[1]}"
                if again and branch is live:
                    branches.append((body[:at], set(live)))
        return None

    def _settled(self, key: Key) -> bool:
        events: dict[int, tuple[tuple[int, ...], bool]] = {}
        for place, shown in self._events.get(key, {}).items():
            events[place[0]] = max(events.get(place[0], ((), False)), (place[1:], shown))
        return bool(events) and all(shown for _, shown in events.values())

    def _use_in(self, statement: ast.stmt, live: set[Key]) -> tuple[int, str] | None:
        """The first use in ``statement``. Variables that it binds to other values are removed from ``live``."""
        if isinstance(statement, Block):
            return None
        if isinstance(statement, ast.For):
            if used := self._use_or_call(statement.iter, live):
                return used
            inner = live - self._bound(statement.target)
            for one in statement.body:
                if found := self._use_in(one, inner):
                    return found
            live -= self._bound(statement.target)
            return None
        if isinstance(statement, ast.With | ast.If | ast.While | ast.Try):
            heads = [*getattr(statement, "items", []), *([statement.test] if hasattr(statement, "test") else [])]
            handled = [one for handler in getattr(statement, "handlers", []) for one in handler.body]
            for head in heads:
                if used := self._use_or_call(head, live):
                    return used
            for part in ("body", "orelse", "finalbody"):
                branch = live if isinstance(statement, ast.With) or part == "finalbody" else set(live)
                for one in [*getattr(statement, part, []), *(handled if part == "orelse" else [])]:
                    if found := self._use_in(one, branch):
                        return found
            return None
        if isinstance(statement, ast.Delete) and deletes_names(statement):
            live -= set().union(*map(self._bound, statement.targets))
            return None
        value = getattr(statement, "value", None)
        if isinstance(statement, ast.Assign) and value is not None and not self._use_or_call(value, live):
            names = [one for one in statement.targets if not isinstance(one, ast.Subscript)]
            live -= set().union(*map(self._bound, names))
            return next((used for one in statement.targets if (used := self._first(one, live))), None)
        return self._use_or_call(statement, live)

    def _bound(self, target: ast.AST) -> set[Key]:
        names = [one for one in ast.walk(target) if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load)]
        return {key for one in names if (key := self._key(one)) is not None}

    def _use_or_call(self, node: ast.AST, live: set[Key]) -> tuple[int, str] | None:
        """A use in ``node``, or in the user's functions that it calls and that have not run with the loop."""
        entered, below = set[Function](), [node]
        while below:
            one = below.pop()
            if found := self._first(one, live):
                return found
            for function in {*self._named_in(one)} - entered - self._ran.keys():
                entered.add(function)
                below += function.body if not isinstance(function, ast.Lambda) else [function.body]
        return None

    def _used_elsewhere(self) -> str | None:
        """Uses of values that a loop in a function leaves in attributes, globals and arguments after its end."""
        if self._own is None:
            return None
        for key, line in self._kept.items():
            if key in {(id(self._own), name) for name in arguments_of(self._own)}:
                return f"line {line} keeps the batch in {key[1]}"
        inside = {id(one) for body in (self._loop, *self._watched) for one in ast.walk(body)}
        owners = {id(self._own), *map(id, self._ran)}
        left = {key for key in self._held if key[0] not in owners and not self._settled(key)}
        for node in (one for tree in self._scopes.trees if left for one in ast.walk(tree)):
            if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load):
                continue
            if id(node) not in inside and self._key(node) in left:
                return f"line {node.lineno}, outside of the loop, uses {ast.unparse(node)}"
        return None
