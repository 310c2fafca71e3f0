"""The flow analysis for ``names``: one walk over the module level of a cell, in execution order."""

from __future__ import annotations
import __future__

import ast
import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from ..marshal import codes, commands

FUTURE = {feature: getattr(__future__, feature).compiler_flag for feature in __future__.all_feature_names}
"""Compiler flags of ``from __future__`` imports."""

_DYNAMIC = frozenset({"exec", "eval", "globals", "locals", "vars", "dir"})
_COMMAND_VERBS = ("system", "getoutput")
_MAGIC_VERBS = ("run_line_magic", "run_cell_magic", "magic")
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class Need:
    """A name that the cell loads. ``line`` is the line number that the user sees.

    ``certain``: the cell surely loads the name, and cannot have bound it before.
    """

    line: int
    certain: bool


@dataclass
class Names:
    """What the analysis found. Lines are the line numbers that the user sees."""

    needs: dict[str, Need] = field(default_factory=dict)
    binds: dict[str, int] = field(default_factory=dict)
    imports: dict[str, int] = field(default_factory=dict)
    """Modules that the cell, or a function in it, imports."""
    surely_imported: set[str] = field(default_factory=set)
    stars: dict[str, int] = field(default_factory=dict)
    """Modules of ``from … import *``; the names that they bind are unknown here."""
    magics: dict[str, int] = field(default_factory=dict)
    commands: dict[str, int] = field(default_factory=dict)
    """Names in ``!command`` → line; they may be variables of the system shell."""
    attributes: set[str] = field(default_factory=set)
    flags: int = 0
    dynamic: bool = False
    """The cell calls ``exec``, ``globals()`` or similar: it may bind names that the analysis cannot see."""
    spoken: set[str] = field(default_factory=set)
    """Words of strings by which the cell itself may look up names; ``texts``: all words of its strings."""
    texts: set[str] = field(default_factory=set)


class Flow(ast.NodeVisitor):
    """Walks the module level in execution order. ``must`` holds names bound on every path, ``may`` on some."""

    def __init__(self, label: str, flags: int) -> None:
        self.names = Names()
        self.must: set[str] = set()
        self.may: set[str] = set()
        self._label = label
        self._flags = flags
        self._unsure = 0
        self._bodies: dict[str, list[codes.References]] = {}
        self._class: set[str] | None = None
        """Names bound so far in the class body being walked."""
        self._unsure_in_class: set[str] = set()
        """Names in ``_class`` that may be unbound; a load then finds the global name."""
        self._class_name = ""
        self._parameters: frozenset[str] = frozenset()
        """Type parameters in scope at the current node."""

    # Loads and bindings.

    def load(self, name: str, line: int) -> None:
        if self._class is not None and name in self._class:
            if name in self._unsure_in_class:
                self._require(name, line, certain=False)
                self._expand(name)
            return
        if name in _DYNAMIC and name not in self.may:
            self.names.dynamic = True
        self._require(name, line, certain=not self._unsure)
        self._expand(name)

    def _require(self, name: str, line: int, certain: bool) -> None:
        if name in self.must or name in self._parameters or name == "__class__":
            return
        need = self.names.needs.setdefault(name, Need(line, False))
        need.certain = need.certain or (certain and name not in self.may)

    def _expand(self, name: str) -> None:
        """A function or class of the cell is used: its body can run from here on."""
        waiting, seen = [name], {name}
        while waiting:
            for references in self._bodies.get(waiting.pop(), ()):
                for used, line in references.loads.items():
                    self._require(used, line, certain=False)
                    if used not in seen:
                        seen.add(used)
                        waiting.append(used)

    def bind(self, name: str, line: int) -> None:
        if self._class is not None:
            if not self._unsure:
                self._unsure_in_class.discard(name)
            elif name not in self._class:
                self._unsure_in_class.add(name)
            self._class.add(name)
            return
        self.must.add(name)
        self.may.add(name)
        self._bodies.pop(name, None) if not self._unsure else None
        self.names.binds.setdefault(name, line)

    def unbind(self, name: str, line: int) -> None:
        if self._class is not None:
            if self._unsure:
                self._unsure_in_class.add(name)
            else:
                self._class.discard(name)
            return
        self.names.needs.setdefault(name, Need(line, False))  # a name that was there, and is not afterwards, is deleted
        self.must.discard(name)
        if not self._unsure:
            self.may.discard(name)

    def _inner(self, node: ast.AST, name: str | None) -> None:
        """Read the names in the body of a function, lambda or comprehension, as the compiler resolves them."""
        for references in self._compiled(node):
            self.names.imports = {**references.imports, **self.names.imports}
            self.names.magics = {**references.magics, **self.names.magics}
            self.names.commands = {**references.commands, **self.names.commands}
            self.names.attributes |= references.attributes
            for stored, line in references.stores.items():
                self.names.binds.setdefault(stored, line)
                self.may.add(stored)
            if name is not None:
                loads = {used: line for used, line in references.loads.items() if used not in self._parameters}
                self._bodies.setdefault(name, []).append(replace(references, loads=loads))
                continue
            sure = not self._unsure and isinstance(node, _COMPREHENSIONS)
            for used, line in references.loads.items():
                # Only the first iterable of a comprehension sees names of a class body.
                self._require(used, line, certain=sure and used not in (self._class or ()))
                self._expand(used)

    def _compiled(self, node: ast.AST) -> Iterator[codes.References]:
        flags = self._flags | self.names.flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        statement = node if isinstance(node, ast.stmt) else ast.Expr(node)  # type: ignore[arg-type]
        ast.fix_missing_locations(ast.copy_location(statement, node))
        module = ast.Module([statement], [])
        code = compile(module, self._label, "exec", flags, dont_inherit=True)
        if isinstance(node, _COMPREHENSIONS):
            yield codes.references(code)
            return
        for constant in code.co_consts:
            if isinstance(constant, type(code)):
                yield codes.references(constant)

    # Blocks and branches.

    def block(self, statements: Iterable[ast.stmt]) -> bool:
        """Visit the statements. Returns whether control flow can reach their end."""
        for statement in statements:
            self.visit(statement)
            if isinstance(statement, (ast.Raise, ast.Return, ast.Break, ast.Continue)):
                return False
        return True

    @contextlib.contextmanager
    def _conditional(self) -> Iterator[None]:
        self._unsure += 1
        try:
            yield
        finally:
            self._unsure -= 1

    def _branches(self, branches: Iterable[Iterable[ast.stmt]], start: set[str] | None = None) -> None:
        """One of the branches runs. Bound afterwards: names that every branch binds, except branches that leave."""
        before = set(self.must if start is None else start)
        ends: list[set[str]] = []
        with self._conditional():
            for branch in branches:
                self.must = set(before)
                if self.block(branch):
                    ends.append(self.must)
        self.must = set.intersection(*ends) if ends else self.may | before

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._branches((node.body, node.orelse))

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self._branches(([ast.Expr(node.body)], [ast.Expr(node.orelse)]))

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        self._branches(([ast.Expr(value) for value in node.values[1:]], []))

    def _loop(self, targets: Iterable[ast.expr], body: list[ast.stmt], orelse: list[ast.stmt]) -> None:
        before = set(self.must)
        self.may |= {name for statement in body for name in _stored(statement)}
        possible = set(self.may)
        for target in targets:
            self.visit(target)
        self.block(body)
        self.must = before
        self.may |= possible
        self._branches((orelse, []))

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self._loop((node.target,), node.body, node.orelse)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        self.visit_For(node)

    def visit_While(self, node: ast.While) -> None:
        self.may |= {name for statement in node.body for name in _stored(statement)}
        self.visit(node.test)
        always = isinstance(node.test, ast.Constant) and bool(node.test.value)
        with contextlib.nullcontext() if always else self._conditional():
            self._loop((), node.body, node.orelse)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self.visit(item)
        before = set(self.must)
        swallows = any("suppress" in ast.dump(item.context_expr) for item in node.items)
        if swallows:
            with self._conditional():
                self.block(node.body)
            self.must = before
        else:
            self.block(node.body)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        self.visit_With(node)

    def visit_Try(self, node: ast.Try) -> None:
        before, in_class = set(self.must), set(self._class or ())
        guarded = any(_catches_name_error(handler) for handler in node.handlers)
        with self._conditional() if guarded else contextlib.nullcontext():
            reached = self.block(node.body)
        with self._conditional():
            reached = reached and self.block(node.orelse)
        ends = [self.must] if reached else []
        if self._class is not None and node.handlers:
            self._unsure_in_class |= self._class - in_class
        for handler in node.handlers:
            self.must = set(before)
            with self._conditional():
                if handler.type is not None:
                    self.visit(handler.type)
                if handler.name:
                    self.bind(handler.name, handler.lineno)
                if self.block(handler.body):
                    ends.append(self.must)
                if handler.name:
                    self.unbind(handler.name, handler.lineno)
        merged = set.intersection(*ends) if ends else self.may | before
        self.must = set(before)
        with self._conditional() if guarded else contextlib.nullcontext():
            self.block(node.finalbody)
        self.must |= merged

    def visit_TryStar(self, node: ast.Try) -> None:
        self.visit_Try(node)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        before, ends = set(self.must), []
        with self._conditional():
            for case in node.cases:
                self.must = set(before)
                self.visit(case.pattern)
                if case.guard is not None:
                    self.visit(case.guard)
                if self.block(case.body):
                    ends.append(self.must)
        last = node.cases[-1]
        if not (isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None and last.guard is None):
            ends.append(before)
        self.must = set.intersection(*ends) if ends else self.may | before

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self.generic_visit(node)
        if node.name:
            self.bind(node.name, node.lineno)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        if node.name:
            self.bind(node.name, node.lineno)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self.generic_visit(node)
        if node.rest:
            self.bind(node.rest, node.lineno)

    # Statements that bind.

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.load(node.target.id, node.target.lineno)
        self.visit(node.value)
        self.visit(node.target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._annotation(node.annotation)
        if node.value is not None:
            self.visit(node.value)
            self.visit(node.target)
        elif not isinstance(node.target, ast.Name):
            self.visit(node.target)

    def _annotation(self, node: ast.expr | None) -> None:
        if node is not None and not self.names.flags & FUTURE["annotations"]:
            with self._conditional():
                self.visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.visit(node.target)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.names.imports.setdefault(alias.name, node.lineno)
            self.bind(alias.asname or alias.name.split(".")[0], node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if module and not node.level:
            self.names.imports.setdefault(module, node.lineno)
        for alias in node.names:
            if alias.name == "*":
                self.names.stars.setdefault(module, node.lineno)
                continue
            if not node.level:
                self.names.imports.setdefault(f"{module}.{alias.name}", node.lineno)
            self.bind(alias.asname or alias.name, node.lineno)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for decorator in node.decorator_list:
            self.visit(decorator)
        arguments = node.args
        for default in (*arguments.defaults, *(item for item in arguments.kw_defaults if item)):
            self.visit(default)
        with self._type_parameters(node):
            for argument in _arguments(arguments):
                self._annotation(argument.annotation)
            self._annotation(node.returns)
            self._define(node, called=bool(node.decorator_list))

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def _define(self, node: ast.FunctionDef | ast.AsyncFunctionDef, called: bool) -> None:
        bare = type(node)(**{**{name: getattr(node, name) for name in node._fields}, "decorator_list": []})
        ast.copy_location(bare, node)
        self.bind(node.name, node.lineno)
        owner = node.name if self._class is None else self._class_name
        self._inner(bare, owner)
        if called and self._class is None:
            self._expand(owner)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        with self._type_parameters(node):
            self._class_statement(node)

    def _class_statement(self, node: ast.ClassDef) -> None:
        for part in (*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)):
            self.visit(part)
        outer, unsure = self._class, self._unsure_in_class
        if outer is None:
            self._class_name = node.name
            self._bodies[node.name] = []
        self._class, self._unsure_in_class = set(), set()
        self.block(node.body)
        self._class, self._unsure_in_class = outer, unsure
        bodies = self._bodies.get(node.name, [])
        self.bind(node.name, node.lineno)
        if outer is None:
            self._bodies[node.name] = bodies
            if node.decorator_list or node.keywords:
                self._expand(node.name)

    def visit_TypeAlias(self, node: ast.AST) -> None:
        name = node.name  # type: ignore[attr-defined]
        with self._conditional(), self._type_parameters(node):
            for part in ast.walk(node.value):  # type: ignore[attr-defined]
                if isinstance(part, ast.Name):
                    self.load(part.id, part.lineno)
        self.visit(name)

    @contextlib.contextmanager
    def _type_parameters(self, node: ast.AST) -> Iterator[None]:
        """Type parameters as in ``class C[T: Bound]`` are in scope within the statement."""
        parameters: list[ast.AST] = getattr(node, "type_params", [])
        before = self._parameters
        self._parameters = before | {str(parameter.name) for parameter in parameters}  # type: ignore[attr-defined]
        with self._conditional():
            for parameter in parameters:
                self.visit(parameter)
        yield
        self._parameters = before

    # Expressions.

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.load(node.id, node.lineno)
        elif isinstance(node.ctx, ast.Store):
            self.bind(node.id, node.lineno)
        else:
            self.load(node.id, node.lineno)
            self.unbind(node.id, node.lineno)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.names.attributes.add(node.attr)
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if (
            isinstance(function, ast.Attribute)
            and isinstance(function.value, ast.Call)
            and isinstance(function.value.func, ast.Name)
            and function.value.func.id == "get_ipython"
        ):
            first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else "magic"
            if function.attr in _MAGIC_VERBS:
                mark = "%%" if function.attr == "run_cell_magic" else "%"
                self.names.magics.setdefault(mark + str(first).split(" ")[0], node.lineno)
            elif function.attr in _COMMAND_VERBS:
                for name in commands.names(str(first)) - self.must:
                    self.names.commands.setdefault(name, node.lineno)
        self.generic_visit(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for default in (*node.args.defaults, *(item for item in node.args.kw_defaults if item)):
            self.visit(default)
        with self._conditional():
            self._inner(node, None)

    def _comprehension(self, node: ast.expr) -> None:
        self._inner(node, None)
        for part in ast.walk(node):
            if isinstance(part, ast.NamedExpr) and isinstance(part.target, ast.Name):
                self.may.add(part.target.id)
                self.names.binds.setdefault(part.target.id, part.lineno)
            elif isinstance(part, ast.Attribute):
                self.names.attributes.add(part.attr)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension


def _stored(node: ast.AST) -> Iterator[str]:
    """Names that a statement may bind at module level, and some that it binds in inner scopes only."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id
        elif isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield part.name
        elif isinstance(part, ast.alias):
            yield part.asname or part.name.split(".")[0]
        elif isinstance(part, (ast.MatchAs, ast.MatchStar, ast.ExceptHandler)) and part.name:
            yield part.name


def _arguments(node: ast.arguments) -> Iterator[ast.arg]:
    yield from (*node.posonlyargs, *node.args, *node.kwonlyargs)
    yield from (argument for argument in (node.vararg, node.kwarg) if argument)


def _catches_name_error(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    caught = {part.id for part in ast.walk(handler.type) if isinstance(part, ast.Name)}
    return bool(caught & {"NameError", "Exception", "BaseException"})
