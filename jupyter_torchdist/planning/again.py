"""The plan of the next attempt: on the nodes that are left, from the last checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..protocol.errors import OptionError
from ..protocol.plan import Died, NodePlan, Plan
from ..protocol.spec import Options
from ..protocol.strategy import StrategyPlan
from ..protocol.wire.again import continued, left, sizes
from .strategy import plan_strategy

MOST = 200
"""For so many sets of hosts that may be left, the strategy is planned before the job begins."""


def next_plan(plan: Plan, options: Options, without: Collection[str], since: float, died: Died | None = None) -> Plan:
    """``plan`` without the nodes named, with ranks numbered anew, and with the checkpoints of this job resumed.

    ``since``: when the job's ranks first ran, in seconds since the epoch; an earlier checkpoint is of another job.
    ``died``: how the last attempt ended. Raises ``OptionError`` when the strategy does not work with fewer ranks.
    """
    nodes = left(plan.nodes, without)
    strategy = _strategy(plan, options, nodes) if without else plan.strategy
    return continued(plan, nodes, strategy, since, died)


def ready(plan: Plan, options: Options) -> dict[str, StrategyPlan]:
    """Strategies for the hosts that may be left when others are lost, by ``sizes``; those that do not work are missing.

    With these the hosts can go on by themselves.
    """
    if plan.least_nodes is None or not plan.restarts:
        return {}
    found: dict[str, StrategyPlan | None] = {}
    sets = [plan.nodes]
    while sets:
        nodes = sets.pop(0)
        for node in nodes:
            fewer = left(nodes, {node.name})
            if len(fewer) < plan.least_nodes or sizes(fewer) in found or len(found) >= MOST:
                continue
            sets.append(fewer)
            try:
                found[sizes(fewer)] = _strategy(plan, options, fewer)
            except OptionError:
                found[sizes(fewer)] = None
    return {key: strategy for key, strategy in found.items() if strategy is not None}


def _strategy(plan: Plan, options: Options, nodes: tuple[NodePlan, ...]) -> StrategyPlan:
    """The plan's strategy on ``nodes``. Raises ``OptionError``."""
    name = plan.strategy.name
    if name == "none":
        return plan.strategy
    return plan_strategy(replace(options, strategy=name), sum(len(node.ranks) for node in nodes), nodes)
