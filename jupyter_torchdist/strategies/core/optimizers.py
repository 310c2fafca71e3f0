"""Keeps the user's optimizer object, and replaces its parameters by those of a strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from ...protocol.errors import StrategyError


def by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters under all their names; call it before a strategy is applied."""
    return dict(model.named_parameters(remove_duplicate=False))


def replaced(before: Mapping[str, nn.Parameter], model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Maps each parameter that was replaced since ``by_name`` to its new parameter."""
    now = by_name(model)
    return {old: now[name] for name, old in before.items() if now[name] is not old}


def release(replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Free the memory of replaced parameters. ``plain.restore`` fills the same objects again later."""
    for old in replaced:
        old.grad = None
        if not old.is_meta:
            old.data = torch.empty(0, dtype=old.dtype)


_NOT_ON_SHARDS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "it lays all parameters end to end in one vector",
    torch.optim.SparseAdam: "gradients of sharded parameters are dense",
    torch.optim.Adafactor: "its means over rows and columns are no operations of DTensor",
}


def check(optimizer: torch.optim.Optimizer, sharded: bool) -> None:
    """Raise ``StrategyError`` for an optimizer that cannot work on shards."""
    for kind, why in _NOT_ON_SHARDS.items():
        if sharded and isinstance(optimizer, kind):
            raise StrategyError(
                f"{type(optimizer).__name__} cannot train parameters that fsdp or tp has sharded: {why}",
                "use --strategy ddp, or another optimizer",
            )


def remap(optimizer: torch.optim.Optimizer, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Let ``optimizer`` train the new parameters; its state moves to them, with their placements.

    Groups keep their order and number (schedulers count them). Call it before ``release``.
    Raises what ``check`` raises.
    """
    check(optimizer, any(isinstance(new, DTensor) for new in replaced.values()))
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(parameter, parameter) for parameter in group["params"]]
    for old, new in replaced.items():
        if old in optimizer.state:
            values = optimizer.state.pop(old)
            optimizer.state[new] = {name: placed_like(value, old, new) for name, value in values.items()}
        if old.grad is not None and new.grad is None:
            new.grad = placed_like(old.grad, old, new)
    one_by_one_where_mixed(optimizer)


def placed_like(value: Any, old: nn.Parameter, new: nn.Parameter) -> Any:
    """Optimizer state with the placements of its parameter. No communication: it is equal on all ranks.

    State of another shape is replicated; a scalar (the step) stays a plain tensor.
    """
    if not isinstance(value, Tensor) or not isinstance(new, DTensor) or isinstance(value, DTensor) or value.ndim == 0:
        return value
    mesh = new.device_mesh
    same = value.shape == new.shape
    placements = new.placements if same else [Replicate()] * mesh.ndim
    home = new.to_local().device
    placed = distribute_tensor(value.detach().to(mesh.device_type), mesh, placements, src_data_rank=None)
    if placed.to_local().device != home:  # offloaded to the CPU
        local = placed.to_local().to(home)
        placed = DTensor.from_local(local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())
    return placed


def one_by_one_where_mixed(optimizer: torch.optim.Optimizer) -> None:
    """Disable foreach and fused kernels for groups that mix DTensors of several meshes, or DTensors and plain tensors.

    Splitting the group would be faster but would break ``optimizer.param_groups[0]["lr"] = …``.
    """
    for group in optimizer.param_groups:
        if _is_mixed(group["params"]):
            if "foreach" in group:
                group["foreach"] = False
            if group.get("fused"):
                group["fused"] = False
                optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def _is_mixed(parameters: Sequence[Tensor]) -> bool:
    return len({p.device_mesh if isinstance(p, DTensor) else None for p in parameters}) > 1
