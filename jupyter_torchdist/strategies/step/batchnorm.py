"""Batch normalisation over the global batch, with its samples on several ranks; in place, also on the CPU.

``torch.nn.SyncBatchNorm`` is another class and refuses CPU tensors. Here the user's modules are kept, and their
``forward`` is replaced until ``revert``. Slices may be uneven or empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...protocol.errors import StrategyError
from ...torch_private.places import BatchNorm, SyncBatchNormFunction
from ..core.context import ParallelContext

_GROUP = "_torchdist_batch_norm_group"
_OURS = (_GROUP, "forward", "__getstate__")


@dataclass
class Sharing:
    """The ranks that divide a batch; ``group`` is None while every rank has the global batch."""

    group: dist.ProcessGroup | None


def check(model: nn.Module) -> None:
    """Raise ``StrategyError`` for batch normalisation whose statistics cannot be combined."""
    for name, module in model.named_modules():
        if _is_ours(module) and type(module).forward is not BatchNorm.forward:
            raise StrategyError(
                f"{name} ({type(module).__name__}) is batch normalisation with its own forward: its statistics would "
                "come only from one rank's part of the batch",
                "use a class of torch.nn, or another normalisation (group, layer)",
            )


def convert(model: nn.Module, context: ParallelContext) -> Sharing | None:
    """Let the batch normalisation of ``model`` share statistics among the data ranks; None if it has none.

    In evaluation each rank uses the running statistics, or statistics of its own input. If every rank has the global
    batch in training, call the model ``with whole_batch(sharing)``.
    """
    layers = [module for module in model.modules() if _is_ours(module)]
    if not layers:
        return None
    sharing = Sharing(context.data_group)
    if context.data_ranks > 1:
        context.say("batch normalisation uses the samples of all ranks, as on a single device")
    for layer in layers:
        vars(layer)[_GROUP] = sharing
        vars(layer)["forward"] = MethodType(_forward, layer)
        vars(layer)["__getstate__"] = MethodType(_plain_state, layer)
    return sharing


def _plain_state(layer: nn.Module) -> dict[str, Any]:
    """The state for copies and files, without our attributes: a copy that is trained is converted separately."""
    return {name: value for name, value in vars(layer).items() if name not in _OURS}


def _is_ours(module: nn.Module) -> bool:
    return isinstance(module, BatchNorm) and not isinstance(module, nn.SyncBatchNorm)


def revert(model: nn.Module) -> None:
    """Undo ``convert``."""
    for module in model.modules():
        if _GROUP in vars(module):
            for name in _OURS:
                vars(module).pop(name, None)


@contextmanager
def whole_batch(*sharings: Sharing | None) -> Iterator[None]:
    """Within it, every rank has the global batch: nothing is shared."""
    groups = [(sharing, sharing.group) for sharing in sharings if sharing is not None]
    for sharing, _ in groups:
        sharing.group = None
    try:
        yield
    finally:
        for sharing, group in groups:
            sharing.group = group


def _forward(layer: Any, x: Tensor) -> Tensor:
    """Replaces ``BatchNorm.forward``."""
    group = vars(layer)[_GROUP].group
    if not layer.training or group is None or group.size() == 1:
        return type(layer).forward(layer, x)  # type: ignore[no-any-return]
    layer._check_input_dim(x)
    if layer.track_running_stats:
        layer.num_batches_tracked.add_(1)
    momentum = layer.momentum
    if momentum is None:
        momentum = 1.0 / float(layer.num_batches_tracked) if layer.track_running_stats else 0.0
    if x.is_cuda:
        return _fused(layer, x, momentum, group)
    statistics = _statistics(x, group)
    _check_enough(statistics, x)
    if layer.running_mean is not None:
        _update_running(layer, statistics, momentum)
    return _Normalise.apply(  # type: ignore[no-any-return,no-untyped-call]
        x, layer.weight, layer.bias, layer.eps, group, statistics
    )


def _fused(layer: Any, x: Tensor, momentum: float, group: dist.ProcessGroup) -> Tensor:
    """PyTorch's kernels for NVIDIA and AMD GPUs, with the running statistics as arguments."""
    return SyncBatchNormFunction.apply(  # type: ignore[no-any-return]
        x,
        layer.weight,
        layer.bias,
        layer.running_mean,
        layer.running_var,
        layer.eps,
        momentum,
        group,
        group.size(),
    )


@dataclass(frozen=True)
class Statistics:
    """Statistics of the samples of all ranks, for each channel."""

    mean: Tensor
    variance: Tensor
    """The biased variance."""
    count: float


def _dims(x: Tensor) -> list[int]:
    """All dimensions but the channels."""
    return [0, *range(2, x.ndim)]


def _wide(x: Tensor) -> Tensor:
    """Half precision is summed in fp32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _spread(channels: Tensor, x: Tensor) -> Tensor:
    """Per-channel values, reshaped to broadcast with ``x``."""
    return channels.view(1, -1, *[1] * (x.ndim - 2))


@torch.no_grad()
def _statistics(x: Tensor, group: dist.ProcessGroup) -> Statistics:
    """Combine the ranks' means and variances in one collective (Chan, Golub and LeVeque, 1983)."""
    wide, channels = _wide(x), x.shape[1]
    count = x.numel() // max(1, channels)
    if count:
        variance, mean = torch.var_mean(wide, _dims(x), correction=0)
    else:
        variance = mean = wide.new_zeros(channels)
    mine = torch.cat([mean, variance, wide.new_tensor([count])])
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    table = torch.stack(parts)
    counts = table[:, -1:]
    total = counts.sum().clamp(min=1)
    means, variances = table[:, :channels], table[:, channels:-1]
    mean = (means * counts).sum(0) / total
    variance = ((variances + (means - mean).square()) * counts).sum(0) / total
    return Statistics(mean, variance, float(counts.sum()))


def _check_enough(statistics: Statistics, x: Tensor) -> None:
    if statistics.count <= 1:  # the message of torch.nn.functional.batch_norm
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")


@torch.no_grad()
def _update_running(layer: Any, statistics: Statistics, momentum: float) -> None:
    unbiased = statistics.variance * (statistics.count / (statistics.count - 1))
    # ``data``, as in PyTorch's kernel: an earlier forward may have saved them for a backward that is still to come
    layer.running_mean.data.lerp_(statistics.mean.to(layer.running_mean.dtype), momentum)
    layer.running_var.data.lerp_(unbiased.to(layer.running_var.dtype), momentum)


class _Normalise(torch.autograd.Function):
    """``(x - mean) / sqrt(variance + eps) * weight + bias``, where mean and variance depend on all ranks' ``x``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup,
        statistics: Statistics,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.eps, ctx.group, ctx.statistics = eps, group, statistics
        scale = torch.rsqrt(statistics.variance + eps)
        shift = -statistics.mean * scale
        if weight is not None:
            scale, shift = scale * weight, shift * weight
        if bias is not None:
            shift = shift + bias
        return (_wide(x) * _spread(scale, x) + _spread(shift, x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: somebody will differentiate this backward
            return (*_differentiable_backward(x, weight, bias, grad, ctx), None, None, None)
        statistics, wide = ctx.statistics, _wide(grad)
        scale = torch.rsqrt(statistics.variance + ctx.eps)
        normal = (_wide(x) - _spread(statistics.mean, x)) * _spread(scale, x)
        of_bias, of_weight = wide.sum(_dims(x)), (wide * normal).sum(_dims(x))
        of_x = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([of_bias, of_weight])
            dist.all_reduce(sums, group=ctx.group)
            of_mean, of_deviation = (sums / statistics.count).chunk(2)
            of_x = wide - _spread(of_mean, x) - normal * _spread(of_deviation, x)
            of_x = (of_x * _spread(scale if weight is None else scale * weight, x)).to(x.dtype)
        return (
            of_x,
            None if weight is None else of_weight.to(weight.dtype),
            None if bias is None else of_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _differentiable_backward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, grad: Tensor, ctx: Any
) -> list[Tensor | None]:
    """The same gradients as functions of ``x``, ``weight`` and ``grad``, from a forward made of simple operations."""
    inputs = [tensor for tensor in (x, weight, bias) if tensor is not None and tensor.requires_grad]
    outputs = _composed(x, weight, bias, ctx.eps, ctx.group, ctx.statistics.count)
    found = iter(torch.autograd.grad(outputs, inputs, grad, create_graph=True, allow_unused=True))
    return [next(found) if t is not None and t.requires_grad else None for t in (x, weight, bias)]


def _composed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup, count: float
) -> Tensor:
    wide = _wide(x)
    mean = _sum_over_ranks(wide.sum(_dims(x)), group) / count
    centred = wide - _spread(mean, x)
    variance = _sum_over_ranks(centred.square().sum(_dims(x)), group) / count
    result = centred * _spread(torch.rsqrt(variance + eps), x)
    if weight is not None:
        result = result * _spread(weight, x)
    if bias is not None:
        result = result + _spread(bias, x)
    return result.to(x.dtype)


class _SumOverRanks(torch.autograd.Function):
    """The loss of each rank depends on the inputs of all ranks: the gradient is summed over ranks, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _sum_over_ranks(grad.contiguous(), ctx.group), None


def _sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _SumOverRanks.apply(x, group)  # type: ignore[no-any-return,no-untyped-call]
