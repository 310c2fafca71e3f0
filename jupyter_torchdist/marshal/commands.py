"""``{expression}`` and ``$name`` in a ``!command``, as IPython expands them (its ``DollarFormatter``)."""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Iterator, Mapping
from typing import Any

INSTEAD_OF_MAGICS = "run it in a cell of its own; on ranks only !command, %time and %%time work"
"""What to do about a magic, which needs IPython."""

_DOLLAR = re.compile(r"(.*?)\$(\$?[\w.]+)(?=([^']*'[^']*')*[^']*$)", re.DOTALL)
"""``$name`` outside single quotes; ``$$name`` is a variable of the system shell."""


def names(command: str) -> set[str]:
    """The names that the expressions in ``command`` use; empty if they cannot be parsed."""
    try:
        trees = [ast.parse(expression.strip(), mode="eval") for _, expression, _ in _parts(command) if expression]
    except (SyntaxError, ValueError):
        return set()
    return {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}


def expand(command: str, scope: Mapping[str, Any]) -> str:
    """``command`` with the values of its expressions; unchanged if one has no value (``$HOME``, braces of awk)."""
    try:
        return "".join(_expanded(command, dict(scope)))
    except Exception:  # noqa: BLE001  # as in IPython: the system shell gets the text unchanged
        return command


def _expanded(command: str, scope: dict[str, Any]) -> Iterator[str]:
    formatter = string.Formatter()
    for text, expression, conversion in _parts(command):
        yield text
        if expression is not None:
            yield format(formatter.convert_field(eval(expression, scope), conversion or None))


def _parts(command: str) -> Iterator[tuple[str, str | None, str]]:
    """Tuples (text, the expression after it or None, its conversion). Raises ``ValueError`` for single braces."""
    for text, field, spec, conversion in string.Formatter().parse(command):
        done, kept = 0, ""
        for match in _DOLLAR.finditer(text):
            kept += match[1]
            if match[2].startswith("$"):
                kept += match[2]
            else:
                yield kept, match[2], ""
                kept = ""
            done = match.end()
        yield kept + text[done:], f"{field}:{spec}" if field and spec else field, conversion or ""
