"""``%dist run``: a script, a module or a command on ranks, shown below the cell as ``%%distribute`` shows a cell."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..client.job import Job
from ..client.submit import submit
from ..protocol.errors import OptionError
from ..protocol.state import JobState
from ..verbs import answers, planned, torchrun
from ..verbs.command_line import help_of, split
from ..verbs.schema import Standing
from ..verbs.stream import Console
from ..verbs.torchrun_logs import LogDir, Output
from ..verbs.waiting import ENDING, Interrupts
from . import background, session, show
from .rich import RichOutput
from .run import foreground, standing
from .session import notebook, notebook_directory

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

RUN = "%dist run"


def run(ip: InteractiveShell, words: Sequence[str]) -> Any:
    """Run the program that ``words`` name. Returns the job with ``--background``, what ``--json`` gives, or None.

    Raises what the first failing rank raised, ``JobCancelled`` after an interrupt, and what ``submit`` raises.
    """
    line = split(words)
    if line.asks_for_help:
        print(help_of(line, RUN))
        return None
    meant = line.meant(os.environ)
    request = line.request(meant, notebook_directory(ip), RUN)
    _check(meant, request.options.background)
    request = replace(request, notebook=notebook(ip))
    if request.options.plan:
        answer = planned.answer(request)
        return answers.plain(answer) if line.json else print(planned.text_of(answer))
    with Interrupts() as interrupts:
        job = submit(request, starting=interrupts.hold)
        session.last = job
        if request.options.background:
            if line.json:
                return answers.plain(Standing.of(job.state))
            background.watch(ip, job)
            return job
        if line.json:
            return standing(job, interrupts, detach=False)
        printed = partial(Printed, job, meant, show.limit(ip)) if meant.output != Output() else None
        return foreground(ip, job, interrupts, lambda rich: None, printed)


class Printed(show.Text):
    """The lines that torchrun's options want printed, and their copies in ``--log-dir``."""

    def __init__(self, job: Job, meant: torchrun.Meant, limit: int | None, rich: RichOutput) -> None:
        self._copies = LogDir(meant.output, job.paths, meant.run_id, meant.role) if meant.output.to_files else None
        tap = self._copies.tap if self._copies else lambda log, text: None
        console = Console(job.paths, limit=limit, output=meant.output, role=meant.role, tap=tap)
        super().__init__(console, rich, job.manifest.notes)

    def tick(self, state: JobState) -> None:
        super().tick(state)
        if self._copies:
            self._copies.tick(state)

    def finish(self, state: JobState, remarks: tuple[str, ...]) -> None:
        super().finish(state, remarks)
        if self._copies:
            self._copies.finish(state)
            print(f"note: copies of the output are in {self._copies.root}", flush=True)


def _check(meant: torchrun.Meant, in_background: bool) -> None:
    """Raises ``OptionError`` for what only a shell can do."""
    if meant.handed:
        raise OptionError(
            f"{meant.handed} is done by torchrun itself, which runs in a shell",
            "for several machines write --hosts HOST,HOST instead",
        )
    if set(meant.signals) != set(ENDING):
        raise OptionError(
            "--signals-to-handle: no signal to this kernel ends the job, which belongs to no kernel",
            "leave it out; `%dist cancel JOB` ends a job",
        )
    if meant.events:
        raise OptionError("--event-log-handler console prints in a shell only", "the view shows the job's events")
    if in_background and meant.output.to_files:
        raise OptionError("--log-dir is written while this cell waits", "leave out --background")
