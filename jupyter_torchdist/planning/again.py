"""The plan of the next attempt: on the nodes that are left, from the last checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..protocol.plan import NodePlan, Plan
from ..protocol.spec import Options
from .strategy import plan_strategy


def next_plan(plan: Plan, options: Options, without: Collection[str], since: float) -> Plan:
    """``plan`` without the nodes named, with ranks numbered anew, and with the checkpoints of this job resumed.

    ``since``: when the job's ranks first ran, in seconds since the epoch; an earlier checkpoint is of another job.
    Raises ``OptionError`` when the strategy does not work with fewer ranks.
    """
    nodes = _numbered([node for node in plan.nodes if node.name not in without]) if without else plan.nodes
    strategy, ranks = plan.strategy, sum(len(node.ranks) for node in nodes)
    if without and strategy.name != "none":
        again = plan_strategy(replace(options, strategy=strategy.name), ranks, nodes)
        strategy = replace(again, resume=strategy.resume, since=strategy.since)
    if strategy.checkpoint and not strategy.resume:
        strategy = replace(strategy, resume=True, since=since)
    return replace(plan, nodes=nodes, world_size=ranks, strategy=strategy)


def _numbered(nodes: list[NodePlan]) -> tuple[NodePlan, ...]:
    """The nodes find their addresses themselves; one alone needs none."""
    found: list[NodePlan] = []
    for node in nodes:
        first = sum(len(one.ranks) for one in found)
        ranks = tuple(range(first, first + len(node.ranks)))
        found.append(replace(node, ranks=ranks, address="", interface=""))
    if len(found) == 1:
        return (replace(found[0], address=NodePlan.address, interface=NodePlan.interface),)
    return tuple(found)
