"""The next attempt of a job whose ranks are started again."""

from __future__ import annotations

import shutil
from dataclasses import replace

from ..planning.again import next_plan
from ..protocol.errors import OptionError
from ..protocol.paths import JobPaths
from ..protocol.plan import Plan
from ..protocol.spec import JobSpec
from ..protocol.state import JobState
from ..protocol.world import World
from ..store.files import publish_json
from .policy import Again, Finish


def next_attempt(
    paths: JobPaths, plan: Plan, spec: JobSpec, state: JobState, action: Again, world: World | None
) -> Plan | Finish:
    """The plan of the attempt after the one with this ``state``; the job's end where there can be none.

    The plan is written, and the results of the earlier attempt are removed.
    """
    if world is None:  # the environment of the ranks went with the first driver
        return action.instead
    since = min((rank.started for rank in state.ranks.values() if rank.started), default=spec.created)
    try:
        found = next_plan(plan, spec.options, action.without, since)
    except OptionError as error:
        reason = f"{action.instead.reason}; the ranks were not started again: {error.message}"
        return replace(action.instead, reason=reason)
    shutil.rmtree(paths.results, ignore_errors=True)
    publish_json(paths.plan, found.to_json())
    return found
