"""Every message with which this package refuses something, read from its source: for the pages ``docs/refusals``."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "jupyter_torchdist"

ERRORS = (
    "CaptureError",
    "CellSyntaxError",
    "CheckpointError",
    "DamagedJob",
    "JobLost",
    "JobNotFound",
    "LaunchError",
    "OptionError",
    "RankFailed",
    "ResourceError",
    "StoreError",
    "StrategyError",
    "TrainingError",
    "UndefinedName",
)
"""Errors that users see; a ``ChannelError`` stays between our processes."""

GAP = "…"
"""Stands for what only the run knows."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, order=True)
class Message:
    """``text`` and ``hint`` with ``GAP`` for values; names of values stand in capitals."""

    file: str
    line: int
    error: str
    text: str
    hint: str


def messages(package: Path = PACKAGE) -> list[Message]:
    """In order of file and line."""
    found: list[Message] = []
    for path in sorted(package.rglob("*.py")):
        found += _of_module(_tree(path), path, str(path.relative_to(package)))
    return sorted(found)


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _of_module(tree: ast.Module, path: Path, file: str) -> Iterator[Message]:
    constants = _imported(tree.body, path) | _assigned(tree.body)
    for node, scope in _calls(tree, constants):
        for text in _texts(node.args[0], scope) if node.args else ():
            hints = list(_texts(node.args[1], scope)) if len(node.args) > 1 else [""]
            if _says_something(text):
                assert isinstance(node.func, ast.Name)
                yield Message(
                    file, node.lineno, node.func.id, text, " / ".join(dict.fromkeys(hint for hint in hints if hint))
                )


def _says_something(text: str) -> bool:
    """Whether it has words beside values. What another place has worded is listed there."""
    return len(re.findall(r"[a-z]{2,}", text)) > 1 or "expected" in text


def _calls(tree: ast.AST, scope: dict[str, list[ast.expr]]) -> Iterator[tuple[ast.Call, dict[str, list[ast.expr]]]]:
    """Each call of an error's class, with what names around it were assigned."""
    for node in ast.iter_child_nodes(tree):
        inner = scope
        if isinstance(node, Function):
            inner = {**scope, **_assigned(node.body)}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS:
            yield node, scope
        yield from _calls(node, inner)


def _assigned(body: list[ast.stmt]) -> dict[str, list[ast.expr]]:
    found: dict[str, list[ast.expr]] = {}
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found.setdefault(node.targets[0].id, []).append(node.value)
    return found


def _imported(body: list[ast.stmt], path: Path) -> dict[str, list[ast.expr]]:
    """Constants of other modules of the package."""
    found: dict[str, list[ast.expr]] = {}
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.level and node.module:
            home = path.parents[node.level - 1].joinpath(*node.module.split(".")).with_suffix(".py")
            names = [alias.name for alias in node.names if alias.name.isupper()]
            if names and home.exists():
                theirs = _assigned(_tree(home).body)
                found |= {name: theirs[name] for name in names if name in theirs}
    return found


def _texts(node: ast.expr, scope: dict[str, list[ast.expr]], depth: int = 0) -> Iterator[str]:
    """All that an expression may be as text."""
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.JoinedStr):
        parts = (str(part.value) if isinstance(part, ast.Constant) else _placeholder(part) for part in node.values)
        yield re.sub(r"(?<=[a-z…])(?=[A-Z]{3})", " ", "".join(parts))
    elif isinstance(node, ast.IfExp | ast.BoolOp) and depth < 3:
        for part in (node.body, node.orelse) if isinstance(node, ast.IfExp) else node.values:
            yield from _texts(part, scope, depth + 1)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and depth < 3:
        for left in _texts(node.left, scope, depth + 1):
            yield from (left + right for right in _texts(node.right, scope, depth + 1))
    elif isinstance(node, ast.Name) and node.id in scope and depth < 3:
        for value in scope[node.id]:
            yield from _texts(value, scope, depth + 1)
    else:
        yield GAP


def _placeholder(node: ast.expr) -> str:
    value = node.value if isinstance(node, ast.FormattedValue) else node
    if isinstance(value, ast.Attribute):
        return value.attr.strip("_").upper()
    if isinstance(value, ast.Name) and len(value.id) > 2:
        return value.id.strip("_").upper()
    return GAP


def cell(text: str) -> str:
    """``text`` within a table of Markdown."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()
