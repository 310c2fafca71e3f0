"""``%dist``: verbs that show a job under the cell are implemented here, the others are shared with the shell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..client.job import Job
from ..client.submit import rerun
from ..verbs import answers, hosts, parse
from ..verbs.perform import perform as perform_text
from ..verbs.waiting import Interrupts
from . import programs, run

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

TAIL = 1000
"""How many lines of each rank ``%dist logs`` prints by default: a notebook stores all of its output."""


def perform(ip: InteractiveShell, line: str) -> Any:
    """Print a verb's text; ``attach`` and ``rerun`` show the job and return it. Raises ``TorchDistError``.

    With ``--json`` nothing is shown, and what the shell prints is returned: the object, for ``logs`` a list.
    ``attach`` and ``rerun`` wait for the job's end then.
    """
    try:
        arguments = parse.parse(line, "%dist")
    except parse.HelpShown as shown:
        print(shown, end="")
        return None
    if arguments.verb == "run":
        return programs.run(ip, arguments.words)
    if arguments.verb in ("attach", "rerun"):
        job = hosts.attached(arguments)
        again = arguments.verb == "rerun"
        if again:
            job = rerun(job, env=arguments.env)
        if arguments.json:
            return _ended(job, detach=not again)
        (run.follow if again else run.look_at)(ip, job)
        return job
    if arguments.json:
        found = [answers.plain(answer) for answer in answers.answers(arguments)]
        return found if arguments.verb == "logs" else found[0]
    if arguments.verb == "logs" and arguments.tail is None and arguments.grep is None:
        arguments.tail = TAIL
    for piece in perform_text(arguments):
        print(piece, end="")
    return None


def _ended(job: Job, *, detach: bool) -> Any:
    with Interrupts() as interrupts:
        interrupts.hold()
        return run.standing(job, interrupts, detach=detach)
