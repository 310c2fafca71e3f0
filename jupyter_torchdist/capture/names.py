"""Which names a cell needs from the notebook, and which it binds: a flow analysis over its syntax tree.

A name is needed when some path reaches its load before the cell binds it. Where control flow is unsure (loops,
branches, ``try``), the name counts as needed. The bodies of functions that the cell defines count where the
function is first used, because they can run from there on.
"""

from __future__ import annotations

import ast
import warnings
from types import CodeType

from ..marshal import codes
from ..protocol.errors import CellSyntaxError
from .flow import FUTURE, Flow, Names


def analyse(source: str, label: str, first_line: int = 1, flags: int = 0) -> Names:
    """The names of a cell. ``flags`` are compiler flags of the notebook's ``from __future__`` imports.

    Raises ``CellSyntaxError`` with the line number that the user sees.
    """
    tree, code = _parse(source, label, first_line, flags)
    flow = Flow(label, flags)
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            flow.names.flags |= sum({FUTURE.get(alias.name, 0) for alias in statement.names})
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            flow.names.surely_imported.add(statement.module)
        elif isinstance(statement, ast.Import):
            flow.names.surely_imported.update(alias.name for alias in statement.names)
    flow.block(tree.body)
    flow.names.texts, flow.names.spoken = (codes.spoken(codes.references(code), how) for how in (True, _by_text(tree)))
    return flow.names


def _by_text(tree: ast.Module) -> bool | None:
    """True if the cell looks up its own names by strings, as ``vars()["x"]`` does; None if its functions may."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and not node.args)
    named = {node.func.id for node in calls if isinstance(node.func, ast.Name)}
    return True if named & {"vars", "locals"} else None


def _parse(source: str, label: str, first_line: int, flags: int) -> tuple[ast.Module, CodeType]:
    await_flag = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    padded = "\n" * (first_line - 1) + source
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = compile(padded, label, "exec", flags | await_flag | ast.PyCF_ONLY_AST, dont_inherit=True)
            code: CodeType = compile(tree, label, "exec", flags | await_flag, dont_inherit=True)
    except SyntaxError as error:
        raise _syntax_error(error, source, label, first_line) from None
    except (ValueError, RecursionError, MemoryError) as error:  # a null byte, an expression nested too deeply
        raise CellSyntaxError(f"the cell does not compile: {error}", filename=label, lineno=first_line) from None
    assert isinstance(tree, ast.Module)
    return tree, code


def _syntax_error(error: SyntaxError, source: str, label: str, first_line: int) -> CellSyntaxError:
    line = error.lineno or first_line
    lines = source.splitlines()
    text = error.text or (lines[line - first_line] if 0 <= line - first_line < len(lines) else "")
    pointer = f"\n    {text.strip()}" if text.strip() else ""
    return CellSyntaxError(
        f"{error.msg} ({label}, line {line}){pointer}",
        filename=label,
        lineno=line,
        offset=error.offset or 0,
        text=text,
    )
