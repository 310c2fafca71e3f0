"""``%%distribute`` and ``%dist``: IPython's arguments become our requests.

Modules that run a cell are imported by the first cell, or before when the kernel is idle: ``%load_ext`` stays fast.
"""

from __future__ import annotations

import contextlib
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
from .session import notebook, notebook_directory

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


@contextlib.contextmanager
def in_words(ip: InteractiveShell) -> Iterator[None]:
    """Show our own errors without our stack, and clear the frames of all errors: they keep captured objects alive."""
    try:
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # IPython keeps the traceback
        if not isinstance(error, TorchDistError):
            raise
        if not hasattr(error, "_render_traceback_"):
            failure.dress(ip, error, failure.refusal(error))
        raise error from None


@magics_class
class TorchDistMagics(Magics):
    """The two magics. They have no state: jobs are on disk, and ``session`` has the last job."""

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
    """Whether a semicolon at the end hides the value; the error of a cell that does not parse is raised later."""
    asks: Any = DisplayHook.semicolon_at_end_of_expression
    try:
        return bool(asks(cell))
    except (tokenize.TokenError, SyntaxError):
        return False


def with_body(lines: list[str]) -> list[str]:
    """Allow ``%%distribute --help`` without a body, which IPython refuses for a cell magic."""
    if len(lines) == 1 and lines[0].startswith("%%distribute"):
        return [lines[0].rstrip("\n") + "\n", "\n"]
    return lines


# IPython skips transformers with side effects when it checks whether a terminal's input is complete.
with_body.has_side_effects = True  # type: ignore[attr-defined]
