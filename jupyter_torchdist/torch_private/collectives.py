"""Collectives, process groups, and torch's flight recorder."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor


def broadcast_all(group: Any, tensors: list[Tensor], bucket_bytes: int, source: int) -> None:
    """Broadcast from ``source``, a rank of ``group``, in buckets."""
    import torch.distributed as dist

    dist._broadcast_coalesced(group, tensors, bucket_bytes, source)  # type: ignore[attr-defined]


def power_sgd_compresses(rows: int, columns: int, rank: int, least: float) -> bool:
    """Whether PowerSGD sends a gradient of this size as factors of rank ``rank``."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    return bool(powerSGD_hook._should_compress(rows, columns, rank, least)[0])


def gathering() -> tuple[Any, str]:
    """(module, name) of the function with which DTensor gathers. It has another name before torch 2.13."""
    from torch.distributed import _functional_collectives as module

    return module, "all_gather_single" if hasattr(module, "all_gather_single") else "all_gather_tensor"


def coordinates() -> tuple[Any, str]:
    """(class, name) of the method with which a device mesh computes this rank's coordinate."""
    return import_module("torch.distributed.device_mesh").DeviceMesh, "_compute_coordinate_on_dim"


def ranks_of_groups() -> list[tuple[Any, dict[int, int]]]:
    """(process group, {rank of the job: rank in the group}) of every group of this process."""
    from torch.distributed import distributed_c10d

    return list(distributed_c10d._world.pg_group_ranks.items())


def recorder_dump(name: str) -> Callable[..., bytes] | None:
    """The dump function of a flight recorder, or None. ``_dump_nccl_trace`` needs torch built with NCCL."""
    from torch._C import _distributed_c10d

    return getattr(_distributed_c10d, name, None)
