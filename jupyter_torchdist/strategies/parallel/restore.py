"""Restores models and optimizers: a notebook gets back ordinary modules with complete, ordinary parameters."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...torch_private.places import REGISTRY_KEY, STATE_KEY
from ...torch_private.training import forget_composable_state
from ..core import dtensors, loading, meta
from ..core.ownership import is_foreign, own_class
from . import zero1

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_NOTES = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_OWN_MARK = "_torchdist_"
_MARKS = (STATE_KEY, REGISTRY_KEY, "_distribute_module_applied", "_is_fsdp_managed_module", "_fsdp_use_orig_params")


def restore(
    model: nn.Module, replaced: Mapping[nn.Parameter, nn.Parameter] | None = None, *, gradients: bool = False
) -> None:
    """Restore ``model`` to its form before any strategy, with the current weights. All ranks must call it.

    Rank 0 gets every weight and buffer complete on the CPU, gathered one parameter at a time; the other ranks get
    parameters with the same names and shapes on the meta device. Classes are the user's own again; no hook, wrapper or
    state of a strategy is left; ties and ``requires_grad`` stay. ``replaced`` maps original parameters to the current
    ones: then the originals get the values and are in the model again, so the user's variables refer to them.
    Gradients are gathered on request, else dropped.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for module in model.modules():
        _strip(module)
    originals = {new: old for old, new in (replaced or {}).items()}
    for parameter, places in loading.slots(model).items():
        loading.put(places, _plain_parameter(parameter, originals.get(parameter), gradients))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, DTensor):  # made by ``parallelize_module``
                module._buffers[name] = dtensors.whole(buffer.detach())
    if dist.get_rank() == 0:
        for buffer in model.buffers():
            buffer.data = buffer.data.cpu()


def strip(model: nn.Module) -> None:
    """As ``restore``, for a model whose parameters were not replaced: every rank keeps them. No communication."""
    for module in model.modules():
        _strip(module)


def restore_optimizer(
    optimizer: torch.optim.Optimizer, replaced: Mapping[nn.Parameter, nn.Parameter] | None = None
) -> None:
    """Gather the optimizer's state on rank 0's CPU; on the meta device on other ranks. All ranks must call it.

    Call it after ``restore`` with the same ``replaced``: then the optimizer has the original parameters. Schedulers and
    gradient scalers have no state of a single rank; they refer to the optimizer, which stays the same object.
    """
    zero1.undo(optimizer)
    originals: dict[Tensor, nn.Parameter] = {new: old for old, new in (replaced or {}).items()}
    for group in optimizer.param_groups:
        group["params"] = [originals.get(parameter, parameter) for parameter in group["params"]]
    state = dict(optimizer.state)
    order: dict[Tensor, int] = {parameter: place for place, parameter in enumerate(loading.trained_by(optimizer))}
    optimizer.state.clear()
    for parameter, values in sorted(state.items(), key=lambda item: order.get(originals.get(item[0], item[0]), -1)):
        kept = {name: whole(value) if isinstance(value, Tensor) else value for name, value in values.items()}
        optimizer.state[originals.get(parameter, parameter)] = kept


def whole(tensor: Tensor) -> Tensor:
    """The complete tensor on the CPU of rank 0, on the meta device elsewhere. All ranks must call it."""
    with torch.no_grad():
        value = dtensors.whole(tensor.detach())
        if dist.get_rank() != 0:
            return torch.empty_like(value, device="meta")
        return value.cpu()


def _plain_parameter(parameter: nn.Parameter, original: nn.Parameter | None, gradients: bool) -> nn.Parameter:
    value = whole(parameter)
    gradient = whole(parameter.grad) if gradients and parameter.grad is not None else None
    wanted = parameter.requires_grad
    if original is None and not isinstance(parameter, DTensor) and type(parameter) is nn.Parameter:
        original = parameter
    if original is not None and original.is_meta and not value.is_meta:
        meta.become(original, value)
    if original is None or original.is_meta != value.is_meta:
        plain = nn.Parameter(value, requires_grad=wanted)
    else:
        plain = original
        plain.grad = None
        plain.data = value
        plain.requires_grad_(wanted)
        _clear(plain._post_accumulate_grad_hooks)
        vars(plain).pop("_fsdp_orig_uid", None)
    plain.grad = gradient
    return plain


def _strip(module: nn.Module) -> None:
    """Restore a module's own class and remove the hooks and marks of strategies."""
    if (own := own_class(module)) is not type(module):
        module.__class__ = own
    for attribute in _HOOKS:
        _clear(getattr(module, attribute, None), module)
    for attribute in [name for name in vars(module) if name in _MARKS or name.startswith(_OWN_MARK)]:
        vars(module).pop(attribute)
    forget_composable_state(module)
    for name, value in list(vars(module).items()):
        if isinstance(value, (FunctionType, MethodType)) and is_foreign(value):
            del vars(module)[name]  # torch.compile's wrapper forwards delattr to the wrapped module
    module._compiled_call_impl = None


def _clear(hooks: MutableMapping[int, Any] | None, module: nn.Module | None = None) -> None:
    """Remove the hooks that strategies registered, and the module's records about each."""
    for number, hook in list((hooks or {}).items()):
        if hooks is not None and is_foreign(hook):
            del hooks[number]
            for notes in _NOTES:
                getattr(module, notes, {}).pop(number, None)
