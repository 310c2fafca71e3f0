"""Mixed precision for replicated models, and loss scales that are the same on all ranks.

Sharded models use FSDP's own policy (``fsdp``). See https://docs.pytorch.org/docs/stable/amp.html.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...protocol.errors import StrategyError
from ...torch_private.tensors import unscale_all
from ..core.context import ParallelContext
from ..core.dtensors import local
from ..core.outputs import changed
from .fsdp import DTYPES

_BEFORE = "_torchdist_forward"
"""Attribute for the forward that was set on the model itself, as torch.compile does; None for its class's forward."""


def apply(model: nn.Module, context: ParallelContext) -> None:
    """Run the forward of ``model`` under autocast; its outputs are fp32, as a loss expects them."""
    dtype = DTYPES.get(context.plan.precision)
    if dtype is None:
        return
    kind = context.device.type
    vars(model)[_BEFORE] = vars(model).get("forward")

    @wraps(type(model).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A method, so that a copy of the model runs with its own parameters."""
        run = vars(self)[_BEFORE] or MethodType(type(self).forward, self)
        with torch.autocast(kind, dtype):
            return changed(run(*args, **kwargs), _in_fp32)

    vars(model)["forward"] = MethodType(forward, model)


def revert(model: nn.Module) -> None:
    """Undo ``apply``."""
    if _BEFORE not in vars(model):
        return
    before = vars(model).pop(_BEFORE)
    del vars(model)["forward"]
    if before is not None:
        vars(model)["forward"] = before


def explain(error: BaseException, context: ParallelContext) -> StrategyError | None:
    """Explains an error of an operation without half precision by ``--precision``; None for another error."""
    asked, kinds = context.plan.precision, {"fp16": "Half", "bf16": "BFloat16"}
    if not isinstance(error, RuntimeError) or f"not implemented for '{kinds.get(asked)}'" not in str(error):
        return None
    return StrategyError(
        f"an operation of the model has no {asked} on the {context.device.type.upper()}: {error}",
        f"compute it on .float() within torch.autocast({context.device.type!r}, enabled=False), "
        "or leave --precision out",
    )


def _in_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def unscale(
    original: Callable[..., dict[torch.device, Tensor]],
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    *args: Any,
    device: torch.device,
    staged: bool = False,
) -> dict[torch.device, Tensor]:
    """In place of ``GradScaler._unscale_grads_``. If ranks have different gradients, all of them must call it.

    ``staged``: the ranks have pipeline stages. ``device``: the device of the process group.
    """
    if staged or any(isinstance(one, DTensor) for group in optimizer.param_groups for one in group["params"]):
        return _agreed(optimizer, *args, device=device)
    return original(scaler, optimizer, *args)


@torch.no_grad()
def _agreed(
    optimizer: torch.optim.Optimizer, inverse: Tensor, found: Tensor, allow_fp16: bool, *, device: torch.device
) -> dict[torch.device, Tensor]:
    """An overflow in one rank's shard or stage counts for all ranks: they skip the same steps and keep one scale.

    torch's own function checks only how the first gradient is sharded, and does not take plain and sharded gradients
    together (``found_inf_reduce_handler`` in ``torch/distributed/tensor/_dispatch.py``). The scaler, or an offloaded
    shard, may be on another device than the process group.
    """
    kinds, flags = _by_kind(optimizer, allow_fp16), {found.device: found}
    for gradients in kinds:
        home = gradients[0].device
        flag = flags.setdefault(home, torch.zeros_like(found, device=home))
        unscale_all(gradients, flag, inverse.to(home))
    worst = torch.stack([flag.to(device) for flag in flags.values()]).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return {home: worst.to(home) for home in flags}


def _by_kind(optimizer: torch.optim.Optimizer, allow_fp16: bool) -> list[list[Tensor]]:
    """This rank's gradients by device and dtype. DTensors are included as their local tensors."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.dtype == torch.float16 and not allow_fp16:
            raise ValueError("Attempting to unscale FP16 gradients.")
        if gradient.is_sparse:
            parameter.grad = gradient = gradient.coalesce()
        values = gradient._values() if gradient.is_sparse else local(gradient)
        kinds.setdefault((values.device, values.dtype), []).append(values)
    return list(kinds.values())
