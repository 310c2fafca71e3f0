"""What a driver gives an agent, and an agent a launcher: one node's part of a job, and its world. Never on disk."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import codec
from ..paths import JobPaths, NodePaths
from ..plan import NodePlan, Plan
from ..process import job_token
from ..strategy import StrategyPlan
from ..typed import Record
from ..world import World

_NONE, _NOWHERE = Plan("", 0, "", (), False, None, None, 0.0), World({}, "", (), 0, {}, "")


@dataclass(frozen=True)
class Assignment(Record):
    """One node's part of one attempt of a job."""

    job_root: str
    blobs: str
    node: str
    plan: Plan
    world: World
    attempt: int = 1
    fresh: bool = False
    restarts: int = 0
    """How often the ranks were started again after a failure."""
    rendezvous: tuple[str, int] | None = None
    """(address, port) of the first node's store; None on the first node, which opens it."""
    left: dict[str, StrategyPlan] = field(default_factory=dict)
    """For hosts that go on without others, by ``again.sizes``: their strategy."""

    def order(self) -> dict[str, Any]:
        """The fields by name without the plan, which goes beside them: it is long, and the same for all nodes."""
        short = replace(self, plan=_NONE, world=_NOWHERE).to_json()
        del short["plan"]
        return {**short, "world": self.world.fields}

    @staticmethod
    def of(order: dict[str, Any], plan: bytes) -> Assignment:
        """From ``order`` and ``Plan.text``. Raises ``ValueError``."""
        return Assignment.from_json({**order, "plan": codec.loads(plan)})

    @property
    def job_paths(self) -> JobPaths:
        return JobPaths(Path(self.job_root))

    @property
    def node_paths(self) -> NodePaths:
        return self.job_paths.node(self.node)

    @property
    def job(self) -> str:
        return self.plan.job

    @property
    def start(self) -> dict[str, int]:
        """Which start of the ranks it is, as events say it."""
        return {"attempt": self.attempt, "restarts": self.restarts}

    @property
    def token(self) -> str:
        return job_token(self.job, self.node)

    def node_plan(self) -> NodePlan:
        return next(node for node in self.plan.nodes if node.name == self.node)
