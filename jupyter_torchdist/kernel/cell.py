"""Reads the running cell from IPython: source, label, first line, compiler flags. Does not change the shell."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..protocol.errors import CellSyntaxError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_TIME = re.compile(r"^([ \t]*)get_ipython\(\)\.run_line_magic\('time', (.+)\)$", re.MULTILINE)
"""``%time`` as IPython has transformed it: what is in a string is not."""

_INPUTS = re.compile(r"_i+|_i\d+")
"""Names that the shell sets again with every cell; their values therefore differ from ``user_ns_hidden``."""
_OUTPUTS = re.compile(r"_|__|___|_\d+")
"""Names that the shell hides although they are values of the notebook: the output of earlier cells."""


@dataclass(frozen=True)
class Cell:
    """One cell under ``%%distribute``."""

    source: str
    """Python code: ``!command`` and ``%magic`` are already calls of ``get_ipython()``."""
    label: str
    first_line: int
    """Line number in the cell of ``source``'s first line: 2 under the magic, 3 with ``%%time`` above it."""
    flags: int
    """Compiler flags of the notebook's ``from __future__`` imports."""
    labels: dict[str, str]
    """File name of an earlier cell's code -> ``Cell In[3]``."""


def read(ip: InteractiveShell, body: str) -> Cell:
    """The running cell; ``body`` is its text below the magic. Raises ``CellSyntaxError``."""
    first_line = _first_line(ip, body)
    transform: Any = ip.transform_cell
    label = f"Cell In[{_number(ip)}]"
    try:
        source = _with_clocks(transform(re.sub(r"\A(\s*)%%time[ \t]*$", r"\1get_ipython().clock()", body, flags=re.M)))
    except SyntaxError as error:
        raise CellSyntaxError(
            error.msg or "invalid syntax",
            "correct the line and run the cell again",
            filename=label,
            lineno=(error.lineno or 1) + first_line - 1,
            offset=error.offset or 0,
            text=error.text or "",
        ) from error
    return Cell(source, label, first_line, ip.compile.flags, labels(ip))


def _with_clocks(source: str) -> str:
    """IPython's code for ``%time`` as code that a rank can run, in the same lines."""
    return _TIME.sub(lambda found: f"{found[1]}with get_ipython().clocked(): {ast.literal_eval(found[2])}", source)


def labels(ip: InteractiveShell) -> dict[str, str]:
    """File name of an executed cell's code -> its name in tracebacks."""
    numbers: dict[str, Any] = getattr(ip.compile, "_filename_map", {})
    return {name: f"Cell In[{number}]" for name, number in numbers.items()}


def shells_own(ip: InteractiveShell) -> frozenset[str]:
    """Names in the notebook's namespace that belong to the shell (``In``, ``Out``, ``_i``, ``get_ipython``…)."""
    hidden = ip.user_ns_hidden
    return frozenset(
        name
        for name, value in ip.user_ns.items()
        if not _OUTPUTS.fullmatch(name) and (_INPUTS.fullmatch(name) or (name in hidden and hidden[name] is value))
    )


def _number(ip: InteractiveShell) -> int:
    """The running cell's number. Newer versions of IPython increase ``execution_count`` before the cell runs."""
    return len(ip.history_manager.input_hist_parsed) - 1 if ip.history_manager else ip.execution_count


def _first_line(ip: InteractiveShell, body: str) -> int:
    """The line of the typed cell in which ``body`` begins; 2 if the typed text is unknown."""
    wanted = body.rstrip()
    for raw in _raw_cells(ip):
        text = raw.rstrip()
        if wanted and text.endswith(wanted) and (len(text) == len(wanted) or text[-len(wanted) - 1] == "\n"):
            return text[: len(text) - len(wanted)].count("\n") + 1
    return 2


def _raw_cells(ip: InteractiveShell) -> list[str]:
    """Candidates for the running cell's text: from the kernel's request, then from the history."""
    parent: Any = getattr(ip, "get_parent", dict)() or {}
    code = parent.get("content", {}).get("code")
    history = ip.history_manager.input_hist_raw if ip.history_manager else []
    return [text for text in (code, history[-1] if history else None) if isinstance(text, str)]
