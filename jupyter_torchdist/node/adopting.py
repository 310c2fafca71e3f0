"""Jobs that an agent has started which is dead: what its successor makes of them."""

from __future__ import annotations

import contextlib
import time

from ..protocol import codec
from ..protocol.machine.limits import limits
from ..protocol.paths import JobPaths, safe_name
from ..protocol.plan import Plan
from ..protocol.wire.assignment import Assignment
from ..protocol.wire.messages import Follow
from .nodejob import NodeJob
from .shipping.handover import attempt_of


def left_by_another(assignment: Assignment) -> NodeJob | None:
    """The job that is to be started, if an earlier agent has started it."""
    if not assignment.node_paths.launcher_events.exists():
        return None
    ranks = assignment.node_plan().ranks
    job = NodeJob(assignment.job_paths, assignment.node, ranks, assignment.attempt, adopt=True)
    job.poll(time.monotonic(), why=killed(job))
    if job.launcher is None:
        job.close()
        return None
    return job


def adopted(paths: JobPaths, said: Follow) -> NodeJob:
    """The job that a driver takes up. The nodes may have gone on to a later attempt than it knows."""
    node, ranks, attempt = safe_name(said.node), said.ranks, attempt_of(paths, safe_name(said.node))
    if attempt > said.attempt:
        plan = Plan.from_json(codec.loads(paths.plan.read_bytes()))
        ranks = next((one.ranks for one in plan.nodes if one.name == node), ranks)
    job = NodeJob(paths, node, ranks, max(attempt, said.attempt), adopt=True)
    job.poll(time.monotonic(), why=killed(job))
    if job.launcher is None and job.state != "ended":
        job.end(0.0, time.monotonic(), "the agent was killed before it had started the ranks\n")
    return job


def killed(job: NodeJob) -> str:
    """Why the launcher is gone, where somebody has ended the agent, too."""
    called = job.node
    with contextlib.suppress(OSError):  # it may not have come here yet
        called = next(node.called for node in job.plan.nodes if node.name == job.node)
    words = f"everything of the job on {called} was killed from outside, our agent too"
    if limits().kills:
        return (
            f"{words}: logind does so when your last login there ends (KillUserProcesses=yes). "
            "`loginctl enable-linger` there lets a job outlive it; then run the cell again\n"
        )
    return f"{words}, or the host was started again. See what ended it there, then run the cell again\n"
