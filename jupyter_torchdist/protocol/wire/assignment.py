"""What a driver gives an agent, and an agent a launcher: one node's part of a job, and its world. Never on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..paths import JobPaths, NodePaths
from ..plan import NodePlan, Plan
from ..process import job_token
from ..typed import Record
from ..world import World


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
    def token(self) -> str:
        return job_token(self.job, self.node)

    def node_plan(self) -> NodePlan:
        return next(node for node in self.plan.nodes if node.name == self.node)
