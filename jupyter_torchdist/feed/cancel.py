"""Cancels a job from a view."""

from __future__ import annotations

from ..client.drivers import DriverPool
from ..client.job import attach_to
from ..protocol.paths import Home, JobPaths
from ..store import liveness


def cancel(paths: JobPaths, home: Home, kill: bool, pool: DriverPool | None = None) -> str:
    """Cancel the job. Returns what was done, as a sentence. Starts a driver if it died. Raises ``TorchDistError``."""
    job = attach_to(paths, home, pool)
    state = job.state
    if state.final:
        return f"the job has ended already: {state.state}"
    effective = liveness.effective_state(paths, state)
    if kill:
        job.kill()
        done = "every process of the job is being killed"
    else:
        job.interrupt()
        done = f"every rank is asked to stop; one that has not after {job.spec.options.grace:g} s is killed"
    if effective == "unreachable":
        return f"{done}, once its driver answers: its host has been silent for a minute"
    if effective == "orphaned":
        job.revive()
        return f"{done}, by a new driver: the job's own had died"
    return done
