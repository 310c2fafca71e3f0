"""``%%distribute`` and ``%dist``: from IPython's words to ours.

What runs a cell is imported by the first cell, or before it when the kernel is idle: ``%load_ext`` should be instant.
"""

from __future__ import annotations

import contextlib
import os
import tokenize
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.displayhook import DisplayHook
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from ..protocol.errors import TorchDistError, UserError
from ..protocol.options.help import help_text
from . import cell as cells
from . import failure, modules

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


@contextlib.contextmanager
def in_words(ip: InteractiveShell) -> Iterator[None]:
    """Our own errors are shown without our own stack; no error's stack keeps alive what was captured."""
    try:
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # IPython keeps it
        if not isinstance(error, TorchDistError):
            raise
        if not hasattr(error, "_render_traceback_"):
            failure.dress(ip, error, failure.refusal(error))
        raise error from None


@magics_class
class TorchDistMagics(Magics):
    """The two magics. They hold nothing: a job is on disk, the last one in ``session``."""

    shell: InteractiveShell

    @cell_magic
    def distribute(self, line: str, cell: str) -> Any:
        """Run this cell on every rank; ``%%distribute --help`` lists the options."""
        if {"--help", "-h"} & set(line.split()):
            print(help_text(line.split()))
            return None
        with in_words(self.shell):
            from ..client.submit import Request
            from ..verbs import defaults
            from . import run

            directory = notebook_directory(self.shell)
            options = defaults.options(line, directory)
            if not cell.strip():
                raise UserError("the cell under %%distribute is empty", "write what every rank should run below it")
            modules.note(self.shell)
            read = cells.read(self.shell, cell)
            request = Request(
                source=read.source,
                label=read.label,
                first_line=read.first_line,
                options=options,
                namespace=self.shell.user_ns,
                hidden=cells.shells_own(self.shell),
                flags=read.flags,
                labels=read.labels,
                notebook=notebook(self.shell),
                cwd=Path.cwd(),
            )
            return run.run(self.shell, request, quiet=_quiet(cell))

    @line_magic
    def dist(self, line: str) -> Any:
        """Jobs: what runs, what ran, and everything to do with them; ``%dist --help`` lists the verbs."""
        with in_words(self.shell):
            from . import dist

            return dist.perform(self.shell, line)


def _quiet(cell: str) -> bool:
    """Whether a semicolon at the end asks not to show the value; a cell that cannot be read is told of later."""
    asks: Any = DisplayHook.semicolon_at_end_of_expression
    try:
        return bool(asks(cell))
    except (tokenize.TokenError, SyntaxError):
        return False


def notebook(ip: InteractiveShell) -> str:
    """The notebook's path as the front end tells it; empty where it does not (a plain terminal, nbclient)."""
    told = os.environ.get("JPY_SESSION_NAME") or ip.user_ns.get("__vsc_ipynb_file__") or ""
    return told if isinstance(told, str) else ""


def notebook_directory(ip: InteractiveShell) -> Path:
    """Where the notebook lies, else where the shell was started."""
    folder = os.path.dirname(notebook(ip))
    return Path(folder if folder and os.path.isdir(folder) else getattr(ip, "starting_dir", "") or os.getcwd())


def with_body(lines: list[str]) -> list[str]:
    """Lets ``%%distribute --help`` stand alone: IPython refuses a cell magic without a body."""
    if len(lines) == 1 and lines[0].startswith("%%distribute"):
        return [lines[0].rstrip("\n") + "\n", "\n"]
    return lines


# IPython leaves such a transformer out when it asks whether a terminal's input is complete.
with_body.has_side_effects = True  # type: ignore[attr-defined]
