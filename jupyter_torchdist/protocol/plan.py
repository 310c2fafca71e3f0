"""What will run where. Pure values; ``planning`` makes them, ``launch`` performs them, ``--plan`` prints them."""

from __future__ import annotations

from dataclasses import dataclass, field

from .strategy import StrategyPlan
from .typed import Record


@dataclass(frozen=True)
class Gpu:
    """One GPU, as NVML names it. Memory in bytes."""

    uuid: str
    index: int
    name: str
    memory: int
    memory_used: int
    pids: tuple[int, ...] = ()
    """Processes that hold memory on it, as seen from this pid namespace."""


@dataclass(frozen=True)
class Inventory(Record):
    """What one node has. Memory in bytes."""

    host: str
    cores: int
    memory: int
    gpus: tuple[Gpu, ...] = ()
    python: str = ""
    torch: str = ""
    numactl: bool = False
    """Whether that program is there, without which torch binds no rank to a NUMA node."""


@dataclass(frozen=True)
class NodePlan:
    """One node's part: its global ranks in order of local rank, and the GPU of each (empty on CPUs)."""

    name: str
    ranks: tuple[int, ...]
    gpus: tuple[str, ...] = ()
    address: str = "127.0.0.1"
    """Where the node's peers reach it: loopback on one node, else the chosen interface's IP."""
    interface: str = "lo"
    host: str = ""
    """Its name, as people know it; empty where it is not known yet."""

    @property
    def called(self) -> str:
        """What people are shown: ``name`` only names files and messages."""
        return self.host or self.name


@dataclass(frozen=True)
class Plan(Record):
    """One job, decided. The first node hosts the rendezvous store."""

    job: str
    world_size: int
    backend: str
    nodes: tuple[NodePlan, ...]
    threads: int
    """``OMP_NUM_THREADS`` of each rank, unless the user set it."""
    fresh: bool
    numa_binding: str | None
    timeout: float | None
    grace: float
    collect: str = "rank0"
    out: tuple[str, ...] = ("auto",)
    env_names: tuple[str, ...] = ()
    strategy: StrategyPlan = field(default_factory=StrategyPlan)
    role: str = "default"
    run_id: str = ""
    """What ranks know the job by; empty: by its id and attempt."""
    port: int = 0
    """On which the store listens; 0: one that is free."""

    def node_of(self, rank: int) -> NodePlan:
        """Raises ``KeyError`` for a rank outside the plan."""
        for node in self.nodes:
            if rank in node.ranks:
                return node
        raise KeyError(rank)

    def gpu_of_rank(self) -> dict[int, str]:
        """The GPU of each rank that has one."""
        return {rank: gpu for node in self.nodes for rank, gpu in zip(node.ranks, node.gpus, strict=False)}
