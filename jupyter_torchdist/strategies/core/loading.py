"""One set of weights for all ranks: rank 0's, before or while they are sharded.

``group`` is always the ranks that hold copies of the same model (``Setting.data_group``); its first rank's weights
hold. Parameters are sent one at a time, so that nobody holds more than one beyond what it keeps.
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
"""Where a parameter hangs; a tied one hangs in several."""


def slots(model: nn.Module) -> dict[nn.Parameter, list[Slot]]:
    """Every parameter once, with all places where it hangs, in the order of ``named_parameters``."""
    found: dict[nn.Parameter, list[Slot]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, []).append((module, name))
    return found


def put(places: list[Slot], parameter: nn.Parameter) -> None:
    """Hang one parameter where another was."""
    for module, name in places:
        module._parameters[name] = parameter


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """The first name of each parameter."""
    return {parameter: name for name, parameter in model.named_parameters()}


def trained_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def move(model: nn.Module, device: torch.device) -> None:
    """Parameters and buffers to a GPU, in place; those without values (meta) stay."""
    if device.type == "cpu":
        return
    for tensor in _states(model):
        if not tensor.is_meta:
            tensor.data = tensor.data.to(device)


def broadcast_states(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """The first rank's parameters and buffers, on all ranks.

    What is the same on all already (models that came from the notebook are) is neither sent nor written: pages that
    the ranks share with its bundle stay shared.
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
    """Those that some rank has otherwise than the first one, and all that are not on the CPU, where sending is fast."""
    digests = [list(_digest(tensor)) if tensor.device.type == "cpu" else [0] * 32 for tensor in tensors]
    mine = torch.tensor(digests, dtype=torch.uint8, device=device).view(-1, 32)
    theirs = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(theirs, mine, group=group)
    same = torch.stack([(theirs[0] == other).all(1) for other in theirs]).all(0).tolist()
    return [t for t, alike in zip(tensors, same, strict=True) if not alike or t.device.type != "cpu"]


def _digest(tensor: Tensor) -> bytes:
    """SHA-256 of the values, from memory: the tensor may be of a type that NumPy has not."""
    whole = tensor.detach().contiguous()
    if whole.numel() == 0:
        return bytes(32)
    memory = (ctypes.c_char * (whole.numel() * whole.element_size())).from_address(whole.data_ptr())
    return hashlib.sha256(memory).digest()


def someone_lacks_weights(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a rank built its model on the meta device.

    Raises ``StrategyError`` on all when the first one did, by other means than ``td.meta``.
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
    """Leave a model without weights (on the meta device), ready to be sharded; the first rank gets them in hand.

    The others let go of theirs now: an optimizer keeps the parameter objects until it is given the sharded ones.
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
    """Fill a model that ``set_aside`` emptied and that was sharded since; a rank's shards live on ``home``."""
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
    """The first rank's tensor; ``full`` is given there alone, the others know its shape from ``like``."""
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
