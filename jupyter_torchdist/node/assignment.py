"""What an agent gives to a launcher: one node's part of one job, and its environment. Never written to disk."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..protocol.paths import JobPaths, NodePaths
from ..protocol.plan import NodePlan, Plan
from ..protocol.process import JOB_TOKEN, JOB_TOKEN_LENGTH, job_token
from ..protocol.world import World

IMPORT_PREFIXES = ("LD_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "PYTHON", "TORCH_", "PYTORCH_", "ATEN_")
"""Prefixes of variables that are read at import or start. A zygote serves only jobs with equal values of these."""

_IMPORT_IGNORED = ("TORCHDIST_",)


def import_environment(environ: dict[str, str]) -> dict[str, str]:
    """The variables that are read at import or start, sorted by name."""
    chosen = (name for name in environ if name.startswith(IMPORT_PREFIXES) and not name.startswith(_IMPORT_IGNORED))
    return {name: environ[name] for name in sorted(chosen)}


@dataclass(frozen=True)
class Assignment:
    """One node's part of one attempt of a job."""

    job_root: str
    blobs: str
    node: str
    plan: dict[str, Any]
    world: World
    attempt: int = 1
    fresh: bool = False
    rendezvous: tuple[str, int] | None = None
    """(address, port) of the first node's store; None on the first node, which opens it."""

    @staticmethod
    def from_json(value: dict[str, Any]) -> Assignment:
        rendezvous = value.get("rendezvous")
        return Assignment(
            **{
                **value,
                "world": World.from_json(value["world"]),
                "rendezvous": (str(rendezvous[0]), int(rendezvous[1])) if rendezvous else None,
            }
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def job_paths(self) -> JobPaths:
        return JobPaths(Path(self.job_root))

    @property
    def node_paths(self) -> NodePaths:
        return self.job_paths.node(self.node)

    @property
    def job(self) -> str:
        return str(self.plan["job"])

    @property
    def token(self) -> str:
        return job_token(self.job, self.node)

    def the_plan(self) -> Plan:
        return Plan.from_json(self.plan)

    def node_plan(self) -> NodePlan:
        return next(node for node in self.the_plan().nodes if node.name == self.node)

    def rank_environment(self) -> dict[str, str]:
        """The notebook's environment plus the variables that the plan adds."""
        plan, node = self.the_plan(), self.node_plan()
        environ = dict(self.world.environ)
        environ.setdefault("OMP_NUM_THREADS", str(plan.threads))
        environ.setdefault("MPLBACKEND", "Agg")
        environ["MPLBACKEND"] = "Agg" if "inline" in environ["MPLBACKEND"] else environ["MPLBACKEND"]
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(node.gpus)
        environ["GLOO_SOCKET_IFNAME"] = node.interface
        if node.interface != "lo":
            environ.setdefault("NCCL_SOCKET_IFNAME", node.interface)
        environ[JOB_TOKEN] = self.token
        return environ


def stamp_job_token(token: str) -> None:
    """Write a job's token into this process's initial environment block, where ``/proc/PID/environ`` shows it.

    A forked process has a copy of its parent's block, and ``setenv`` would store the variable outside the block.
    So the zygote starts with a placeholder of the right length, which is overwritten in place (as setproctitle does).
    """
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rsplit(b")", 1)[1].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end: fields 50 and 51 of proc(5)
    block = ctypes.string_at(start, end - start)
    name = f"{JOB_TOKEN}=".encode()
    at = block.find(name)
    if at >= 0 and len(block) >= at + len(name) + JOB_TOKEN_LENGTH:
        ctypes.memmove(start + at + len(name), token.encode("ascii"), JOB_TOKEN_LENGTH)


def enter(assignment: Assignment) -> None:
    """Apply the notebook's environment, working directory, ``sys.path``, umask and resource limits to this process."""
    world = assignment.world
    os.environ.clear()
    os.environ.update(assignment.rank_environment())
    os.umask(world.umask)
    try:
        os.chdir(world.cwd)
    except OSError:
        os.chdir(assignment.job_root)
    sys.path[:] = [*world.sys_path] or sys.path
    for name, (soft, hard) in world.rlimits.items():
        kind = getattr(resource, name, None)
        if kind is not None:
            try:
                resource.setrlimit(kind, (soft, hard))
            except (ValueError, OSError):
                continue  # above this process's hard limit, which it cannot raise
