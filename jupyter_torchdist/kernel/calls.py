"""Calls of functions on ranks (``@distributed``, ``launch``) from a notebook, shown as a cell's job is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..client.job import Job
from ..client.submit import Request, submit
from ..protocol.state import JobState
from ..verbs.waiting import Interrupts
from . import cell, modules, run, session, show
from .rich import RichOutput
from .session import notebook

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def of_this_notebook(ip: InteractiveShell, request: Request) -> Request:
    """The call with what only this kernel knows: the notebook, and the names of its cells in tracebacks."""
    modules.note(ip)
    return replace(request, labels=cell.labels(ip), notebook=notebook(ip))


def values(ip: InteractiveShell, request: Request, started: Callable[[Job], None]) -> Any:
    """Run the call, shown below the cell. Returns the values by rank, with ``collect="rank0"`` rank 0's alone.

    Raises what ``run.run`` raises, and ``UserError`` for a value that cannot be pickled.
    """
    with Interrupts() as interrupts:
        job = submit(request, starting=interrupts.hold)
        session.last = job
        started(job)
        return run.foreground(ip, job, interrupts, lambda rich: job.returned())


@contextlib.contextmanager
def shown(ip: InteractiveShell, job: Job) -> Iterator[Callable[[JobState], None]]:
    """Shows the job while a caller takes the items of its generator. Gives a function that draws a state."""
    session.last = job
    rich = RichOutput(ip, job.paths, visible=job.spec.options.watch != "off")
    watch = show.watch(ip, job.paths, job.spec.options.watch, rich, job.manifest.notes)
    try:
        yield watch.tick
    finally:
        watch.finish(job.state, ())
    if error := run.error_of(ip, job, job.state):
        raise error from error.__cause__
