"""Waits for what each rank of a running job answers to a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Set

from ..protocol.events import Event
from ..protocol.state import JobState
from ..store import journal
from .job import Job


def of(
    job: Job,
    kind: str,
    seq: int,
    patience: float,
    asked: Callable[[JobState], Set[int]],
    match: Callable[[Event], bool] = lambda event: True,
) -> dict[int, Event]:
    """The last event of this kind after ``seq`` of each rank, once all of ``asked`` have one.

    After ``patience`` seconds, and when the job has ended, those that there are. Raises what ``Job.revive`` raises.
    """
    until = time.monotonic() + patience
    found: dict[int, Event] = {}
    offset = 0
    while True:
        state = job.state  # before the events: what a job wrote before its end is among them
        events, offset = journal.read(job.paths, offset)
        for event in events:
            if event.seq > seq and event.kind == kind and event.rank is not None and match(event):
                found[event.rank] = event
        if state.final or not asked(state) - found.keys() or time.monotonic() > until:
            return found
        job.revive()
        time.sleep(0.05)
