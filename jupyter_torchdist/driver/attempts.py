"""The next attempt of a job: begun by the driver, or by the nodes while no driver was connected."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from dataclasses import replace

from ..planning.again import next_plan
from ..protocol.errors import OptionError
from ..protocol.eventreader import EventReader
from ..protocol.paths import JobPaths
from ..protocol.plan import Died, Plan
from ..protocol.spec import JobSpec
from ..protocol.state import JobState
from ..protocol.wire.again import Again as Begun
from ..protocol.wire.again import in_vain, last_step
from ..protocol.world import World
from ..store.files import publish_json
from ..views.wording import others
from .policy import Again, AttemptStatus, Finish, follows


def next_attempt(
    paths: JobPaths, plan: Plan, spec: JobSpec, state: JobState, action: Again, world: World | None, moved: bool
) -> Plan | Finish:
    """The plan of the attempt after the one with this ``state``; the job's end where there can be none.

    ``moved``: the engine took the nodes, which says nothing against another attempt. The plan is written, and the
    results of the earlier attempt are removed.
    """
    if world is None:  # the environment of the ranks went with the first driver
        return action.instead
    died = Died(state.attempt, _fault(state, action.instead), _last_step(paths, plan, state))
    if not moved and (why := in_vain(plan, died)):
        return replace(action.instead, reason=f"{action.instead.reason}; {why}")
    since = min((rank.started for rank in state.ranks.values() if rank.started), default=spec.created)
    try:
        found = next_plan(plan, spec.options, action.without, since, died)
    except OptionError as error:
        reason = f"{action.instead.reason}; the ranks were not started again: {error.message}"
        return replace(action.instead, reason=reason)
    return _published(paths, found)


def _published(paths: JobPaths, plan: Plan) -> Plan:
    shutil.rmtree(paths.results, ignore_errors=True)
    publish_json(paths.plan, plan.to_json())
    return plan


def of_next(standing: AttemptStatus) -> AttemptStatus:
    """The status of the attempt after one with ``standing``. What clients asked for holds."""
    return AttemptStatus(interrupts=standing.interrupts, kill=standing.kill, terminate=standing.terminate)


def unexplained(state: JobState, end: Finish) -> bool:
    """Whether the attempt failed without an exception of user code: no rank failed, one was killed, or lost others."""
    if end.state != "failed" or end.first_failure is None:
        return end.state == "failed"
    rank = state.ranks[end.first_failure]
    return rank.error is None or follows(rank)


def _fault(state: JobState, end: Finish) -> str:
    """What ended the attempt, so that the same fault is known again."""
    if end.state == "lost" or end.first_failure is None:
        return "host"
    rank = state.ranks[end.first_failure]
    return rank.error.type if rank.error else f"exit code {rank.code}"


def _last_step(paths: JobPaths, plan: Plan, state: JobState) -> int | None:
    ranks = [rank for rank in state.ranks.values() if rank.started]
    return last_step({paths.node(plan.node_of(rank.rank).name).metrics(rank.rank): rank.started for rank in ranks})


def gone_on(readers: Mapping[str, EventReader]) -> Begun | None:
    """The attempt that the nodes have begun by themselves, and that this driver does not follow yet."""
    for reader in readers.values():
        if reader.ahead is not None and reader.ahead.kind == "node.up" and "died" in reader.ahead.data:
            said = reader.ahead.data
            died = Died.from_json(said["died"])
            return Begun(said["attempt"], said["restarts"], tuple(said["without"]), said["since"], died)
    return None


def over(plan: Plan, begun: Begun, ended: Collection[str]) -> bool:
    """Whether all is here of the attempt before, from the nodes that are left."""
    return all(node.name in ended for node in plan.nodes if node.name not in begun.without)


def followed(paths: JobPaths, plan: Plan, spec: JobSpec, begun: Begun) -> Plan:
    """The plan of the attempt that the nodes have begun. It is written; results that are here are removed."""
    return _published(paths, next_plan(plan, spec.options, begun.without, begun.since, begun.died))


def in_words(end: Finish, plan: Plan, begun: Begun) -> str:
    """What a note says of it. ``end``: of the attempt before."""
    where, which = others(len(plan.nodes), "host"), f"{begun.restarts} of {plan.restarts}"
    return f"{end.reason}; all ranks were started again on the other {where} ({which}), without this machine"
