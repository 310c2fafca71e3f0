"""``%dist``: verbs that show a job under the cell are implemented here, the others are shared with the shell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..client.job import attach
from ..client.submit import rerun
from ..verbs import parse
from ..verbs.perform import perform as perform_text
from . import run

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

TAIL = 1000
"""How many lines of each rank ``%dist logs`` prints by default: a notebook stores all of its output."""


def perform(ip: InteractiveShell, line: str) -> Any:
    """Print a verb's text; ``attach`` and ``rerun`` show the job and return it. Raises ``TorchDistError``."""
    try:
        arguments = parse.parse(line, "%dist")
    except parse.HelpShown as shown:
        print(shown, end="")
        return None
    if arguments.verb in ("attach", "rerun"):
        job = attach(arguments.job)
        if arguments.verb == "attach":
            run.look_at(ip, job)
        else:
            run.follow(ip, job := rerun(job))
        return job
    if arguments.verb == "logs" and arguments.tail is None and arguments.grep is None:
        arguments.tail = TAIL
    for piece in perform_text(arguments):
        print(piece, end="")
    return None
