"""Linear layers of tensor parallelism that compute with plain tensors: each rank multiplies by its local weight.

Parameters are DTensors, as PyTorch's styles make them, and so are tensors between a column-wise and a row-wise layer.
Within a layer there is no DTensor dispatch, whose decisions for each operation take time. The all-reduces are the ones
of Megatron-LM (https://arxiv.org/abs/1909.08053, section 3): one in the backward of a column-wise layer, one in the
forward of a row-wise layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from ...protocol.errors import StrategyError
from ..core.scatter import Group
from .sequences import Forward, around_forward


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes what ``nn.Linear`` does."""
    return type(module).forward is nn.Linear.forward and "forward" not in vars(module)


class ColwiseLinear(ColwiseParallel):
    """For linear layers: takes a whole tensor and returns this rank's part of the last dimension."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()

        def forward(_original: Forward, given: Tensor) -> Tensor:
            if isinstance(given, DTensor):
                whole = given.redistribute(placements=(Replicate(),)).to_local(grad_placements=(Partial(),))
            else:
                whole = entering(given, group)
            part = F.linear(whole, *_own(module))
            if self.use_local_output:
                return part
            return DTensor.from_local(part, device_mesh, (Shard(part.ndim - 1),), run_check=False)

        distribute_module(module, device_mesh, self._partition_linear_fn)
        around_forward(module, forward)
        return module


class RowwiseLinear(RowwiseParallel):
    """For linear layers: takes this rank's part of the last dimension and returns a whole tensor."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()

        def forward(_original: Forward, part: Tensor) -> Tensor:
            if isinstance(part, DTensor):
                part = part.redistribute(placements=(Shard(part.ndim - 1),)).to_local()
            elif part.shape[-1] == module.in_features:  # a whole input: no column-wise layer before it
                part = entering(part, group).chunk(group.size(), -1)[group.rank()]
            weight, bias = _own(module)
            total = summed(F.linear(part, weight), group)
            return total if bias is None else total + bias.to(total.dtype)

        distribute_module(module, device_mesh, self._partition_linear_fn)
        around_forward(module, forward)
        return module


def entering(whole: Tensor, group: Group) -> Tensor:
    """A tensor that each rank uses in its part of a computation. Backward: the sum of the ranks' gradients."""
    same: Tensor = _Entering.apply(whole, group)  # type: ignore[no-untyped-call]
    return same


def summed(part: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' tensors. Backward: the gradient, which is the same on all ranks."""
    total: Tensor = _Summed.apply(part, group)  # type: ignore[no-untyped-call]
    return total


class _Entering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return summed(grads[0], ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        ctx.group = group
        total = part.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return entering(grads[0], ctx.group), None


def _own(module: Any) -> tuple[Tensor, Tensor | None]:
    """This rank's part of weight and bias. Raises ``StrategyError`` if fsdp has sharded that part again."""
    if module.weight.device_mesh.ndim > 1:
        raise StrategyError(
            f"a {type(module).__name__} that tp split and fsdp sharded is called outside of the model's "
            "forward, and only the model's forward gathers it",
            "call the model, or use --strategy ddp",
        )
    return module.weight.to_local(), None if module.bias is None else module.bias.to_local()
