"""Which parts of the source have not run: statements, and arms of expressions."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping

from ...usercode.source import Block, Comprehension, Function, bound_by

_MOVES = frozenset({"to", "cuda", "cpu", "float", "half", "double", "bfloat16", "long", "detach", "contiguous"})
"""Methods whose result holds the same samples."""
_NOTHING = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass, ast.Global, ast.Nonlocal, ast.Break, ast.Continue,
    ast.Raise, ast.Import, ast.ImportFrom,
)  # fmt: skip


def not_run_of(function: Function, ran: Mapping[Function, Collection[int]]) -> Iterator[ast.AST]:
    if isinstance(function, ast.Lambda):
        return arms(function.body, ran)
    return not_run(function.body, ran[function], ran=ran)


def not_run(
    body: Iterable[ast.stmt], lines: Collection[int], head: int = 0, ran: Collection[Function] = ()
) -> Iterator[ast.AST]:
    """The outermost statements that have not run at all, and arms of expressions that may not have run.

    ``head`` is the last line of the test before them. A statement on that line counts as not run: only lines are known.
    """
    for statement in body:
        if isinstance(statement, _NOTHING) or _is_text(statement) or deletes_names(statement):
            continue
        lines_of = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
        if statement.lineno <= head or not any(line in lines for line in lines_of):
            if not _takes_next(statement):
                yield statement
            continue
        yield from arms(statement, ran)
        for part, test in _bodies(statement):
            yield from not_run(part, lines, test, ran)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def deletes_names(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Delete) and all(isinstance(one, ast.Name) for one in statement.targets)


def _takes_next(statement: ast.stmt) -> bool:
    """``batch = next(batches)``, after the loader was exhausted: the batch is like the previous ones."""
    value = statement.value if isinstance(statement, ast.Assign) else None
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "next"


def _bodies(statement: ast.stmt) -> Iterator[tuple[list[ast.stmt], int]]:
    """The statement lists in a statement, each with the last line of the test that decides whether it runs."""
    head = getattr(statement, "test", None) or getattr(statement, "iter", None)
    yield getattr(statement, "body", []), (head.end_lineno or 0) if head is not None else 0
    for part in ("orelse", "finalbody"):
        yield getattr(statement, part, []), 0
    for handler in getattr(statement, "handlers", []):
        yield handler.body, handler.lineno
    for case in getattr(statement, "cases", []):
        yield case.body, (case.guard or case.pattern).end_lineno or 0


def arms(node: ast.AST, ran: Collection[Function] = ()) -> Iterator[ast.expr]:
    """Parts of a statement's expressions that may not have run although the statement has."""
    below: list[ast.AST] = [node]
    while below:
        one = below.pop()
        if isinstance(one, Block) or (isinstance(one, ast.stmt | ast.excepthandler) and one is not node):
            continue
        if isinstance(one, ast.Assign) and all(isinstance(name, ast.Name | ast.Tuple) for name in one.targets):
            values = one.value.elts if isinstance(one.value, ast.Tuple) else [one.value]
            below += [part for value in values for part in ([value] if _moved(value) is None else _tests(value))]
        elif isinstance(one, ast.IfExp):
            below.append(one.test)
            yield from (one.body, one.orelse)
        elif isinstance(one, ast.BoolOp):
            below.append(one.values[0])
            yield from one.values[1:]
        elif isinstance(one, ast.Compare):
            below += [one.left, one.comparators[0]]
            yield from one.comparators[1:]
        elif isinstance(one, ast.match_case):
            if one.guard is not None:
                yield one.guard
        elif isinstance(one, Comprehension) and any(not _always(each) for each in one.generators):
            below.append(one.generators[0].iter)
            yield from (one.key, one.value) if isinstance(one, ast.DictComp) else (one.elt,)
            yield from (test for each in one.generators for test in each.ifs)
            yield from (each.iter for each in one.generators[1:])
        elif isinstance(one, ast.Lambda):
            if one not in ran:
                yield one.body
        else:
            below += ast.iter_child_nodes(one)


def _always(each: ast.comprehension) -> bool:
    odd = (ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.UnaryOp)
    return not each.ifs and not any(isinstance(one, odd) for one in ast.walk(each.iter))


def _moved(value: ast.AST) -> str | None:
    """The variable whose samples are all in ``value``, whichever arm runs: ``x.cuda() if cuda else x``."""
    if isinstance(value, ast.Name):
        return value.id
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _MOVES:
        return _moved(value.func.value)
    if isinstance(value, ast.IfExp):
        name = _moved(value.body)
        return name if name == _moved(value.orelse) else None
    if isinstance(value, ast.DictComp | ast.ListComp) and len(value.generators) == 1:
        name = _moved(value.value if isinstance(value, ast.DictComp) else value.elt)
        whose = next(iter(bound_by(value.generators[0].iter)), None)
        return whose if name in bound_by(value.generators[0].target) else None
    return None


def _tests(value: ast.AST) -> list[ast.expr]:
    if isinstance(value, ast.IfExp):
        return [value.test, *_tests(value.body), *_tests(value.orelse)]
    generators = value.generators if isinstance(value, Comprehension) else []
    return [test for each in generators for test in (each.iter, *each.ifs)]
