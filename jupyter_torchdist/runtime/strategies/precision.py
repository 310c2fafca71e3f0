"""Mixed precision of replicated models, and loss scales on which all ranks agree.

Sharded models have FSDP's own policy (``fsdp``). See https://docs.pytorch.org/docs/stable/amp.html.
"""

from __future__ import annotations

from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ...protocol.errors import StrategyError
from .base import Setting
from .dtensors import local
from .fsdp import DTYPES

_BEFORE = "_torchdist_forward"
"""What was set on a model itself as its forward, as torch.compile does; None for its class's."""


def apply(model: nn.Module, setting: Setting) -> None:
    """Run the forward of ``model`` under autocast; its outputs are fp32, as a loss expects them."""
    dtype = DTYPES.get(setting.plan.precision)
    if dtype is None:
        return
    kind = setting.device.type
    vars(model)[_BEFORE] = vars(model).get("forward")

    @wraps(type(model).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A method, so that a copy of the model has its own."""
        run = vars(self)[_BEFORE] or MethodType(type(self).forward, self)
        with torch.autocast(kind, dtype):
            return tree_map_only(Tensor, _in_fp32, run(*args, **kwargs))

    vars(model)["forward"] = MethodType(forward, model)


def revert(model: nn.Module) -> None:
    """Take back what ``apply`` did."""
    if _BEFORE not in vars(model):
        return
    before = vars(model).pop(_BEFORE)
    del vars(model)["forward"]
    if before is not None:
        vars(model)["forward"] = before


def explain(error: BaseException, setting: Setting) -> StrategyError | None:
    """What an operation's refusal of half precision has to do with ``--precision``; None for any other error."""
    asked, kinds = setting.plan.precision, {"fp16": "Half", "bf16": "BFloat16"}
    if not isinstance(error, RuntimeError) or f"not implemented for '{kinds.get(asked)}'" not in str(error):
        return None
    return StrategyError(
        f"an operation of the model has no {asked} on the {setting.device.type.upper()}: {error}",
        f"compute it on .float() within torch.autocast({setting.device.type!r}, enabled=False), or in fp32 all",
    )


def _in_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def agree(scaler: torch.amp.GradScaler, group: dist.ProcessGroup | None = None) -> None:
    """Let all ranks of ``group`` (all there are, by default) skip the same steps and keep the same scale.

    In the user's own scaler: an overflow in one rank's shard, stage or bucket is then one of all ranks.
    """

    @torch.no_grad()
    def unscale(
        optimizer: torch.optim.Optimizer, inverse: Tensor, found: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """In place of ``GradScaler._unscale_grads_``, on the rank's own parts of all gradients."""
        flags = {found.device: found}
        for gradients in _by_kind(optimizer, allow_fp16):
            device = gradients[0].device
            flag = flags.setdefault(device, torch.zeros_like(found, device=device))
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, inverse.to(device))
        worst = torch.stack([flag.to(found.device) for flag in flags.values()]).max()
        dist.all_reduce(worst, dist.ReduceOp.MAX, group)
        return {device: worst.to(device) for device in flags}

    scaler._unscale_grads_ = unscale  # type: ignore[method-assign,assignment]


def _by_kind(optimizer: torch.optim.Optimizer, allow_fp16: bool) -> list[list[Tensor]]:
    """This rank's gradients by device and type; DTensors and plain ones go together as local tensors."""
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
