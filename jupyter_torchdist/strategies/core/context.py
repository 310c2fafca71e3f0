"""What every parallelism is given, and what it offers.

A parallelism is a module of ``strategies/parallel`` (``Parallelism``). None knows the options of another. They are
applied in the order ``cp``, ``tp``, activation checkpointing, compilation, then one of ``replicate`` and ``fsdp``;
``pipeline`` cuts the model before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...protocol.errors import StrategyError
from ...protocol.strategy import DIMENSIONS, StrategyPlan


@dataclass(frozen=True)
class ParallelContext:
    """This rank's part in a strategy."""

    plan: StrategyPlan
    mesh: DeviceMesh
    """The ``DIMENSIONS`` of more than one rank; ``dp_replicate`` where there is none."""
    device: torch.device
    say: Callable[[str], None]
    """Tells the user one line, once a job: rank 0 prints it, the others do nothing."""

    @cached_property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks among which a batch is divided; all ranks ask for it at the same moment."""
        if self.data_ranks == 1 and dist.get_world_size() > 1:
            alone: dist.ProcessGroup = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            return alone
        return self.data_mesh.get_group()

    @property
    def data_mesh(self) -> DeviceMesh:
        """One dimension: ``dp_replicate`` and ``dp_shard`` together."""
        names = tuple(name for name in ("dp_replicate", "dp_shard") if name in (self.mesh.mesh_dim_names or ()))
        return self.mesh[names]._flatten("dp") if len(names) > 1 else self.mesh[names]

    @property
    def data_ranks(self) -> int:
        return self.plan.degree("dp_replicate") * self.plan.degree("dp_shard")


def make_context(plan: StrategyPlan, device: torch.device, say: Callable[[str], None]) -> ParallelContext:
    """The mesh over all ranks of the process group; every rank calls this.

    A dimension of one rank would cost a group for each rank of the job, and with Gloo a thread that wakes 100 times a
    second.
    """
    names = tuple(name for name in DIMENSIONS if plan.degree(name) > 1) or ("dp_replicate",)
    sizes = tuple(plan.degree(name) for name in names)
    return ParallelContext(plan, init_device_mesh(device.type, sizes, mesh_dim_names=names), device, say)


class Parallelism(Protocol):
    """A way to divide a model over ranks."""

    def check(self, model: nn.Module, context: ParallelContext) -> None:
        """Raise ``StrategyError`` for what ``apply`` could not do correctly. It sends and changes nothing."""

    def apply(self, model: nn.Module, context: ParallelContext) -> None:
        """Divide the model in place, so that every name that the user bound stays bound to the same object.

        All ranks call it at the same moment.
        """


class Division(Parallelism, Protocol):
    """A parallelism that divides layers or sequences. Its model is compared with the undivided one."""

    def explain(self, error: BaseException) -> StrategyError | None:
        """What an error in the divided model means; None for an error that has another cause."""
