"""What every parallelism is given, and what it offers.

A parallelism is a module of this package with two functions, ``check(model, setting)`` and ``apply(model, setting)``.
``check`` raises ``StrategyError`` for what ``apply`` could not do correctly; it communicates nothing and changes
nothing. ``apply`` changes the model in place, so that every name that the user bound stays bound to the user's
object; all ranks call it at the same moment. None knows another's options. They are applied in the order ``cp``,
``tp``, activation checkpointing, compilation, then one of ``replicate`` and ``fsdp``; ``pipeline`` cuts the model
before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...protocol.strategy import DIMENSIONS, StrategyPlan


@dataclass(frozen=True)
class Setting:
    """This rank's part in a strategy."""

    plan: StrategyPlan
    mesh: DeviceMesh
    """All ``DIMENSIONS``, those of one rank too, so that ``mesh["tp"]`` is always there."""
    device: torch.device
    say: Callable[[str], None]
    """Tells the user one line, once a job: rank 0 prints it, the others do nothing."""

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks among which a batch is divided."""
        return self.data_mesh.get_group()

    @property
    def data_mesh(self) -> DeviceMesh:
        """One dimension: ``dp_replicate`` and ``dp_shard`` together."""
        return self.mesh["dp_replicate", "dp_shard"]._flatten("dp")

    @property
    def data_ranks(self) -> int:
        return self.plan.degree("dp_replicate") * self.plan.degree("dp_shard")


def make_setting(plan: StrategyPlan, device: torch.device, say: Callable[[str], None]) -> Setting:
    """The mesh over all ranks of the process group; every rank calls this."""
    sizes = tuple(plan.degree(dimension) for dimension in DIMENSIONS)
    return Setting(plan, init_device_mesh(device.type, sizes, mesh_dim_names=DIMENSIONS), device, say)
