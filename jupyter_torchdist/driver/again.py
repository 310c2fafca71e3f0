"""The next attempt of a job whose ranks are started again."""

from __future__ import annotations

from dataclasses import replace

from ..planning.again import next_plan
from ..protocol.errors import OptionError
from ..protocol.plan import Plan
from ..protocol.spec import JobSpec
from ..protocol.state import JobState
from ..protocol.world import World
from .policy import Again, Finish


def planned(plan: Plan, spec: JobSpec, state: JobState, action: Again, world: World | None) -> Plan | Finish:
    """The plan of the attempt after the one with this ``state``; the job's end where there can be none."""
    if world is None:  # the environment of the ranks went with the first driver
        return action.instead
    since = min((rank.started for rank in state.ranks.values() if rank.started), default=spec.created)
    try:
        return next_plan(plan, spec.options, action.without, since)
    except OptionError as error:
        reason = f"{action.instead.reason}; the ranks were not started again: {error.message}"
        return replace(action.instead, reason=reason)
