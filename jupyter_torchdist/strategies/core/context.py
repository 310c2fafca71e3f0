"""The context that every parallelism receives, and the interface that it implements.

A parallelism is a module of ``strategies/parallel`` (``Parallelism``). It does not know the options of the others.
The order is: ``pipeline`` cuts the model, then ``cp``, ``tp``, activation checkpointing, compilation, and one of
``replicate`` and ``fsdp``.
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
from .proving import Proving


@dataclass(frozen=True)
class ParallelContext:
    """This rank's part in a strategy."""

    plan: StrategyPlan
    mesh: DeviceMesh
    """The ``DIMENSIONS`` with more than one rank; only ``dp_replicate`` if no dimension has."""
    device: torch.device
    say: Callable[[str], None]
    """Prints a line for the user, once a job: on rank 0 only."""
    proving: Proving
    """Active while the first steps are proved."""

    @cached_property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that divide a batch among them. The first access is collective."""
        if self.data_ranks == 1 and dist.get_world_size() > 1:
            alone: dist.ProcessGroup = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            return alone
        return self.data_mesh.get_group()

    @property
    def data_mesh(self) -> DeviceMesh:
        """``dp_replicate`` and ``dp_shard`` as one mesh dimension."""
        names = tuple(name for name in ("dp_replicate", "dp_shard") if name in (self.mesh.mesh_dim_names or ()))
        return self.mesh[names]._flatten("dp") if len(names) > 1 else self.mesh[names]

    @property
    def data_ranks(self) -> int:
        return self.plan.degree("dp_replicate") * self.plan.degree("dp_shard")


def make_context(
    plan: StrategyPlan,
    device: torch.device,
    say: Callable[[str], None],
    proves: Callable[[float], None] = lambda _seconds: None,
) -> ParallelContext:
    """The mesh over all ranks of the process group; every rank calls this.

    Dimensions of one rank are left out: each would cost a group for each rank of the job, and with Gloo a thread that
    wakes 100 times a second.
    """
    names = tuple(name for name in DIMENSIONS if plan.degree(name) > 1) or ("dp_replicate",)
    sizes = tuple(plan.degree(name) for name in names)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    return ParallelContext(plan, mesh, device, say, Proving(proves))


class Parallelism(Protocol):
    """A way to divide a model over ranks."""

    def check(self, model: nn.Module, context: ParallelContext) -> None:
        """Raise ``StrategyError`` for what ``apply`` could not do correctly. Communicates and changes nothing."""

    def apply(self, model: nn.Module, context: ParallelContext) -> None:
        """Divide the model in place: every name of the user stays bound to the same object.

        A collective call.
        """


class Division(Parallelism, Protocol):
    """A parallelism that divides layers or sequences. The divided model is compared with the undivided one."""

    def explain(self, error: BaseException) -> StrategyError | None:
        """An explanation of an error in the divided model; None if the error has another cause."""
