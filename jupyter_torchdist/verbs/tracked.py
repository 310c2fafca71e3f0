"""``track``: delivers a job to trackers, after its end too."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator

from ..client.job import Job, attach
from ..protocol.errors import UserError
from ..store import tracking
from ..trackers import registry
from ..trackers.process import SECONDS, start

PATIENCE = 60.0
"""Seconds for which delivery is tried, if ``SECONDS`` is not set."""


def track(arguments: argparse.Namespace) -> Iterator[tracking.Tracking]:
    """Deliver what is not delivered yet. Raises ``UserError``, ``OptionError``, ``LaunchError``."""
    job = attach(arguments.job)
    names = tuple(dict.fromkeys(arguments.trackers or job.spec.options.track))
    if not names:
        raise UserError(f"job {job.id} was not launched with --track", f"name a tracker: %dist track {job.id} mlflow")
    registry.check(names, os.environ)
    left = []
    for name in names:
        known = _delivered(job, name)
        if job.state.final and not known.closed and not known.lives:
            left.append(f"{name}: {known.said}")
        else:
            yield known
    if left:
        raise UserError("; ".join(left), "see that its server answers, and run the command again")


def _delivered(job: Job, name: str) -> tracking.Tracking:
    """Once everything is delivered or time is up; of a running job, once its run is known."""
    known = tracking.of(job.paths, name)
    if known.closed or known.lives:
        return known
    process = start(job.paths, name, {SECONDS: str(PATIENCE), **os.environ}, os.getcwd())
    while process.poll() is None:
        known = tracking.of(job.paths, name)
        if not job.state.final and known.process and known.process.pid == process.pid and known.link:
            break
        time.sleep(0.05)
    return tracking.of(job.paths, name)
