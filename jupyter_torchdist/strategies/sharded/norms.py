"""Clips gradients as on one device, also when they are sharded over different meshes or not sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..core.dtensors import local, whole

Parameters = Tensor | Iterable[Tensor]


def total_norm(gradients: Sequence[Tensor], norm_type: float = 2.0, stages: dist.ProcessGroup | None = None) -> Tensor:
    """The norm over all parameters, the same on all ranks, as a plain tensor.

    ``torch.nn.utils.get_total_norm`` takes only DTensors of one mesh, or only plain tensors. Here the norm of each mesh
    is computed, and the norms are combined. ``stages``: the group of a pipeline, whose ranks have other parameters.
    """
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    norms = [torch.nn.utils.get_total_norm(part, norm_type) for part in by_mesh.values()]
    wholes = [whole(norm) for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(wholes), norm_type) if wholes else torch.zeros(())
    if stages is None:
        return total
    if math.isinf(norm_type):
        dist.all_reduce(total, dist.ReduceOp.MAX, stages)
        return total
    total = total**norm_type
    dist.all_reduce(total, group=stages)
    return total ** (1.0 / norm_type)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    stages: dist.ProcessGroup | None = None,
) -> Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``, for any mixture of plain and sharded parameters. All ranks must call it.

    ``foreach`` is accepted but ignored.
    """
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [parameter.grad for parameter in listed if parameter.grad is not None]
    total = total_norm(gradients, float(norm_type), stages)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped."
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        part = local(gradient)
        part.mul_(factor.to(part.device))
    return total


@torch.no_grad()
def clip_grad_value_(
    _original: Callable[..., None], parameters: Parameters, clip_value: float, foreach: bool | None = None
) -> None:
    """As ``torch.nn.utils.clip_grad_value_``, for any mixture of plain and sharded parameters."""
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        if parameter.grad is not None:
            local(parameter.grad).clamp_(-float(clip_value), float(clip_value))
