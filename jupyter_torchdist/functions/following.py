"""Runs the call of a function and shows its job where the caller is: below the cell, or as lines in a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..client import items as job_items
from ..client.job import Job
from ..client.submit import Request, submit
from ..protocol.errors import JobCancelled
from ..protocol.state import JobState
from ..verbs.stream import Console
from ..verbs.waiting import Interrupts, wait


def shell() -> Any:
    """IPython's shell in which this code runs; None in a script, in pytest, in Python's own REPL."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None else None


def placed(request: Request) -> Request:
    """The call as it is started from this notebook; unchanged elsewhere."""
    if ip := shell():
        from ..kernel import calls

        return calls.of_this_notebook(ip, request)
    return request


def directory() -> Path:
    """The directory whose files give options: the notebook's, else the working directory."""
    if ip := shell():
        from ..kernel.session import notebook_directory

        return notebook_directory(ip)
    return Path.cwd()


def values(request: Request, started: Callable[[Job], None] = lambda job: None) -> list[Any]:
    """Run the call until its end; its values by rank (with ``collect="rank0"`` rank 0's alone).

    ``started`` gets the job. The first interrupt stops the ranks, a second one kills them.
    Raises what the first failing rank raised.
    """
    if ip := shell():
        from ..kernel import calls  # only an IPython session loads it

        return calls.values(ip, request, started)  # type: ignore[no-any-return]
    with Interrupts() as interrupts:
        job = submit(request, starting=interrupts.hold)
        started(job)
        with _printed(job) as tick:
            state = wait(job, interrupts, tick)
    if not state.final:
        raise JobCancelled(f"stopped waiting for job {job.id}, which is {state.state}")
    job.raise_for_state()
    for note in job.bring_state():
        print(f"note: {note}", file=sys.stderr)
    return job.returned()


def items(request: Request) -> Iterator[Any]:
    """Run the call of a generator; its items as they come. A caller that stops taking items ends the job.

    Raises what the first failing rank raised, and ``UserError`` if ranks yielded different numbers of items.
    """
    job = submit(request)
    with _shown(job) as tick:
        try:
            yield from job_items.follow(job, tick)
        except (KeyboardInterrupt, GeneratorExit):
            _end(job)
            raise
    job.raise_for_state()


def _end(job: Job) -> None:
    """Interrupt the ranks, and kill what is left of them after the grace."""
    job.interrupt()
    try:
        job.wait(job.plan.grace + 5)
    except (KeyboardInterrupt, TimeoutError):
        job.kill()
        job.wait()


@contextlib.contextmanager
def _printed(job: Job) -> Iterator[Callable[[JobState], None]]:
    """Print the ranks' output as labelled lines."""
    if job.spec.options.watch == "off":
        yield lambda state: None
        return
    for note in job.manifest.notes:
        print(f"note: {note}", file=sys.stderr)
    console = Console(job.paths)
    try:
        yield console.tick
    finally:
        console.finish(job.state, time.time())


def _shown(job: Job) -> contextlib.AbstractContextManager[Callable[[JobState], None]]:
    ip = shell()
    if ip is None:
        return _printed(job)
    from ..kernel import calls

    return calls.shown(ip, job)
