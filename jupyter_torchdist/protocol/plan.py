"""What will run where. Pure values: ``planning`` makes them, ``launch`` runs them, ``--plan`` prints them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from . import codec
from .strategy import StrategyPlan
from .typed import Record


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


@dataclass(frozen=True)
class Gpu:
    """One GPU, as NVML describes it. Memory in bytes."""

    uuid: str
    index: int
    name: str
    memory: int
    memory_used: int
    pids: tuple[int, ...] = ()
    """Processes that hold memory on it, as seen from this pid namespace."""
    job: str = ""
    """The job that has it: ``20260102-030405-0a0b0c of alice@laptop``; empty: none."""

    @property
    def idle(self) -> bool:
        """Whether no process uses it and no job has it."""
        return not self.pids and not self.job

    def is_a(self, kind: str) -> bool:
        """Whether the words of ``kind`` stand in the name: ``A10`` is in ``NVIDIA A10``, not in ``NVIDIA A100``."""
        words, wanted = _words(self.name), _words(kind)
        return any(words[index : index + len(wanted)] == wanted for index in range(len(words)))


_OPEN = "any-"


def open_gpu(index: int, kind: str = "gpu") -> Gpu:
    """A GPU of this kind that the engine will choose: the one at place ``index`` of those that it gives on a node."""
    return Gpu(uuid=f"{_OPEN}{kind}-{index}", index=index, name=kind, memory=0, memory_used=0)


def is_open(gpu: str) -> bool:
    """Whether the UUID is one of ``open_gpu``."""
    return gpu.startswith(_OPEN)


def open_kind(gpus: Iterable[str]) -> str:
    """The one kind of the open GPUs with these UUIDs; empty if the engine did not name it, or there are several."""
    kinds = {gpu.removeprefix(_OPEN).rpartition("-")[0] for gpu in gpus if is_open(gpu)}
    return kinds.pop() if len(kinds) == 1 and kinds != {"gpu"} else ""


@dataclass(frozen=True)
class Reach(Record):
    """How an interpreter is started on a host that ``ssh`` reaches. All is empty for this machine."""

    python: str = ""
    scratch: str = ""
    """A directory of the host for code and data."""
    setup: str = ""
    """Commands of the shell before Python."""
    bring: str = ""
    """How much of the files that a cell writes there comes back at most, such as ``1G``."""
    forward: str = ""
    """A socket of this machine that ``ssh`` forwards to the agent's."""
    login: str = ""
    """Of the connection that found the agent, as the agent calls it."""


@dataclass(frozen=True)
class Software(Record):
    """What an interpreter finds on its path."""

    versions: dict[str, str]
    """Of distributions, by their normalised names."""
    modules: tuple[str, ...]
    """Names at the top level that can be imported, those of the standard library too."""


@dataclass(frozen=True)
class Kept(Record):
    """What a node keeps for the next jobs of a driver without its disk. Sizes in bytes."""

    data: int = 0
    """Captured data, and wheels."""
    environments: int = 0
    """How many were made for ``--env-sync``."""
    environments_size: int = 0


@dataclass(frozen=True)
class Wanted(Record):
    """The packages of the notebook that a host lacks, or has in another version."""

    pins: tuple[str, ...]
    """``numpy==2.3.1``."""
    present: dict[str, str]
    """Versions of the distributions that the host has, by their normalised names."""
    release: str
    """Of the host's Python."""
    platform: str
    """As in ``Inventory``."""

    @property
    def key(self) -> str:
        """A name for what is to be got. Hosts that want the same have the same."""
        return hashlib.sha256(codec.dumps(self.to_json()).encode("ascii")).hexdigest()[:16]


@dataclass(frozen=True)
class InfinibandPort(Record):
    """A port of an adapter for InfiniBand or RoCE, as the kernel describes it."""

    port: str
    """``mlx5_0:1``."""
    state: str
    """``ACTIVE``, ``DOWN``, ``INIT``, ``ARMED``."""
    rate: str
    """``200 Gb/sec (4X HDR)``."""
    layer: str
    """``InfiniBand``, or ``Ethernet`` for RoCE."""


@dataclass(frozen=True)
class Limits(Record):
    """What a node lets processes use. Sizes in bytes."""

    shared_memory: int
    """Of /dev/shm; -1 where there is none."""
    locked: int
    """Memory that a process may lock; -1 for no limit."""
    files: int
    """How many a process may have open; -1 for no limit."""
    infiniband: tuple[InfinibandPort, ...]
    kills: bool
    """Whether logind kills our processes at the end of the last login."""


@dataclass(frozen=True)
class Inventory(Record):
    """The resources of one node. Memory in bytes."""

    host: str
    cores: int
    memory: int
    gpus: tuple[Gpu, ...] = ()
    python: str = ""
    torch: str = ""
    disk: int = 0
    """Free bytes of the scratch directory."""
    numactl: bool = False
    """Whether the program ``numactl`` is installed; torch needs it to bind ranks to NUMA nodes."""
    addresses: tuple[str, ...] = ()
    """Addresses for other nodes, the preferred one first."""
    reach: Reach = field(default_factory=Reach)
    slots: int | None = None
    """The number of ranks that the user wants there; None: the plan decides."""
    software: Software | None = None
    """None for this machine: it is the notebook's."""
    allocation: str = ""
    """Of the engine, as in ``Plan``."""
    limits: Limits | None = None
    """None of a node that only its engine has described."""
    platform: str = ""
    """As the names of wheels have it: ``manylinux_2_36_x86_64``."""


@dataclass(frozen=True)
class NodePlan:
    """One node's part of the plan: its global ranks in order of local rank, and the GPU of each (empty on CPUs)."""

    name: str
    ranks: tuple[int, ...]
    gpus: tuple[str, ...] = ()
    gpu_numbers: tuple[int, ...] = ()
    """Their numbers on the host, as ``nvidia-smi`` counts; empty if they were chosen after the plan."""
    address: str = "127.0.0.1"
    """The address for other nodes: loopback on a single node, else an IP. Empty: by the route to the first node."""
    interface: str = "lo"
    """Empty: that of the address, which the node finds itself."""
    threads: int = 1
    """``OMP_NUM_THREADS`` of each rank, unless the user set it."""
    reach: Reach = field(default_factory=Reach)
    host: str = ""
    """The host name; empty if it is not known yet."""
    packages: Wanted | None = None
    """With ``--env-sync``: what is to be installed there."""

    @property
    def called(self) -> str:
        """The name to show to users; ``name`` is only for files and messages."""
        return self.host or self.name


@dataclass(frozen=True)
class Died(Record):
    """How an attempt ended after which the ranks were started again."""

    attempt: int
    """Its number, from 1."""
    fault: str
    """What ended it; equal for faults of one kind."""
    step: int | None
    """The last one that its ranks told of; None: unknown."""


@dataclass(frozen=True)
class Plan(Record):
    """The plan of one job. The first node hosts the rendezvous store."""

    job: str
    world_size: int
    backend: str
    nodes: tuple[NodePlan, ...]
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
    """The run id for the ranks; empty: made from the job's id and attempt."""
    port: int = 0
    """The port of the rendezvous store; 0: a free port."""
    restarts: int = 0
    """How often all ranks are started again after a failure."""
    least_nodes: int | None = None
    """With how many nodes the job goes on when others are lost. None: all are needed."""
    died: Died | None = None
    """How the attempt before ended; None for the first."""
    virtual_local_rank: bool = False
    lease: float = 0.0
    """Seconds that ranks on hosts go on without the driver."""
    asked: float = 0.0
    """Seconds that the question to the hosts took."""
    driver: int = 1
    """The number of the machine that drives the job. Each machine that takes the job over has the next number."""
    sync: tuple[str, ...] = ()
    """Directories of this machine that go to the hosts, as absolute paths."""
    cwd: str = ""
    """With ``sync``: the notebook's directory."""
    request: str = ""
    """What the engine is sent, such as a batch script; empty where the driver starts everything itself."""
    allocation: str = ""
    """Of the engine, in which the job runs: the id of a Slurm job, the address of a Ray cluster; empty: a new one."""
    login: str = ""
    """The host on which the engine's commands run, over SSH; empty: this machine."""
    configuration: str = ""
    """Files that say where the engine is (``KUBECONFIG``), as absolute paths; empty: where it looks by itself."""

    @cached_property
    def text(self) -> bytes:
        """As JSON. All nodes get the same."""
        return codec.dumps(self.to_json()).encode("ascii")

    def node_of(self, rank: int) -> NodePlan:
        """The node of ``rank``. Raises ``KeyError`` for a rank outside the plan."""
        for node in self.nodes:
            if rank in node.ranks:
                return node
        raise KeyError(rank)

    def called(self, rank: int, host: str = "") -> str:
        """``rank 3 (node2, GPU 5)``: with ``host``, and its GPU there, or ``cuda:1`` if its number is not known."""
        node = self.node_of(rank)
        place = node.ranks.index(rank)
        about = [host] if host else []
        if node.gpus:
            about.append(f"GPU {node.gpu_numbers[place]}" if node.gpu_numbers else f"cuda:{place}")
        return f"rank {rank}" + (f" ({', '.join(about)})" if about else "")

    def gpu_of_rank(self) -> dict[int, str]:
        """The GPU of each rank that has one."""
        return {rank: gpu for node in self.nodes for rank, gpu in zip(node.ranks, node.gpus, strict=False)}
