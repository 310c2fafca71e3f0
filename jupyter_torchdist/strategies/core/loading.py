"""Broadcasts the weights of rank 0 to all ranks, before or while they are sharded.

``group`` is always the ranks that hold copies of the same model (``Setting.data_group``); all get the weights of its
first rank. Parameters are sent one at a time: a rank holds at most one full parameter beyond its own shards.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...protocol.errors import StrategyError
from ...torch_private.places import compute_local_shape_and_global_offset
from . import meta
from .dtensors import local

Slot = tuple[nn.Module, str]
"""Module and attribute name of a parameter; a tied parameter has several slots."""


def slots(model: nn.Module) -> dict[nn.Parameter, list[Slot]]:
    """Every parameter once, with all its slots, in the order of ``named_parameters``."""
    found: dict[nn.Parameter, list[Slot]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, []).append((module, name))
    return found


def put(places: list[Slot], parameter: nn.Parameter) -> None:
    """Register ``parameter`` in the slots of another."""
    for module, name in places:
        module._parameters[name] = parameter


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """The first name of each parameter."""
    return {parameter: name for name, parameter in model.named_parameters()}


def trained_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def move(model: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers to a GPU, in place; meta tensors are left alone."""
    if device.type == "cpu":
        return
    for tensor in _states(model):
        if not tensor.is_meta:
            tensor.data = tensor.data.to(device)


def broadcast_states(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Broadcast the parameters and buffers of the first rank.

    Tensors that are equal on all ranks (as in models from the notebook) are neither sent nor written: memory pages
    that the ranks share with the notebook's bundle stay shared.
    """
    with torch.no_grad():
        for own in _differing([local(tensor) for tensor in _states(model)], group, device):
            theirs = own.to(device, copy=True).contiguous()
            dist.broadcast(theirs, group=group, group_src=0)
            own.copy_(theirs)


def _states(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _differing(tensors: list[Tensor], group: dist.ProcessGroup, device: torch.device) -> list[Tensor]:
    """Tensors that differ on some rank from the first rank, and all tensors on GPUs, where sending is fast."""
    digests = [list(_digest(tensor)) if tensor.device.type == "cpu" else [0] * 32 for tensor in tensors]
    mine = torch.tensor(digests, dtype=torch.uint8, device=device).view(-1, 32)
    theirs = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(theirs, mine, group=group)
    same = torch.stack([(theirs[0] == other).all(1) for other in theirs]).all(0).tolist()
    return [t for t, alike in zip(tensors, same, strict=True) if not alike or t.device.type != "cpu"]


def _digest(tensor: Tensor) -> bytes:
    """SHA-256 of the tensor's memory: NumPy may lack its dtype."""
    whole = tensor.detach().contiguous()
    if whole.numel() == 0:
        return bytes(32)
    memory = (ctypes.c_char * (whole.numel() * whole.element_size())).from_address(whole.data_ptr())
    return hashlib.sha256(memory).digest()


def someone_lacks_weights(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether any rank built its model on the meta device.

    Raises ``StrategyError`` on all ranks if the first rank did so without ``td.meta``.
    """
    lacking = [parameter for parameter in model.parameters() if parameter.is_meta]
    for_good = [parameter for parameter in lacking if not meta.is_recorded(parameter)]
    mine = torch.tensor([len(lacking), len(for_good)], device=device)
    counts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(counts, mine, group=group)
    if missing := int(counts[0][1]):
        raise StrategyError(
            f"{missing} parameters of {type(model).__name__} have no values on rank 0 (they are on the meta device)",
            "build the model within td.meta(), or load its weights on rank 0 (load_state_dict(…, assign=True)): the "
            "other ranks get them from there",
        )
    return any(bool(int(count[0])) for count in counts)


def set_aside(model: nn.Module, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Move a model to the meta device, ready to be sharded. Returns the weights by name, on the first rank only.

    The other ranks free their weights now: an optimizer keeps the parameter objects until it gets the sharded ones.
    """
    names, kept = names_of(model), {}
    if dist.get_rank(group) == 0:
        meta.want(model)
    for parameter, places in slots(model).items():
        empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        if dist.get_rank(group) == 0:
            kept[names[parameter]] = parameter.detach()
        elif not parameter.is_meta:
            parameter.data = parameter.new_empty(0)
        put(places, empty)
    return kept


def hand_out(
    model: nn.Module, weights: dict[str, Tensor], group: dist.ProcessGroup, device: torch.device, home: torch.device
) -> None:
    """Fill a model that was emptied by ``set_aside`` and then sharded; the shards are put on ``home``."""
    names = names_of(model)
    for parameter, places in slots(model).items():
        full = _received(weights.pop(names[parameter], None), parameter, group, device)
        put(places, nn.Parameter(_share(full, parameter, home), requires_grad=parameter.requires_grad))
    with torch.no_grad():
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = _received(
                        buffer if dist.get_rank(group) == 0 else None, buffer, group, device
                    )


def _received(full: Tensor | None, like: Tensor, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Broadcast ``full``, given on the first rank only; the other ranks take its shape from ``like``."""
    if full is None:
        full = torch.empty(like.shape, dtype=like.dtype, device=device)
    full = meta.value_of(full).to(device).contiguous()
    dist.broadcast(full, group=group, group_src=0)
    return full


def _share(full: Tensor, parameter: Tensor, home: torch.device) -> Tensor:
    if not isinstance(parameter, DTensor):
        return full
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, offset = compute_local_shape_and_global_offset(full.shape, mesh, placements)
    part = tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))
    local = full[part].clone().to(home)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
