"""Internals of ``fully_shard``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from .places import FSDPParam, FSDPParamGroup

from .settings import release


def replicate_with_fsdp(*args: Any, **kwargs: Any) -> None:
    """Replicate a model in place with FSDP2. Needs torch 2.9 (``releases.check_plan``)."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(*args, **kwargs)


def fsdp_state(unit: Any) -> Any:
    """The ``FSDPState`` of a module wrapped by ``fully_shard``."""
    return unit._get_fsdp_state()


def fsdp_states(root: Any) -> list[Any]:
    """The states of all units of ``root``, without duplicates (before 2.12 torch lists a state once per module)."""
    return list(dict.fromkeys(root._get_fsdp_state()._state_ctx.all_states))


def fsdp_groups(state: Any) -> list[FSDPParamGroup]:
    """The groups of a unit's parameters that are gathered together. A unit may have several from torch 2.12 on."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def fsdp_begin(root: Any) -> None:
    """Make ``root`` the root of its units now instead of at its first forward."""
    root._get_fsdp_state()._lazy_init()
    if release() < (2, 9):  # Gloo would sum although a mean is requested
        for group in (group for state in fsdp_states(root) for group in fsdp_groups(state)):
            group.force_sum_reduction_for_comms = group.device.type == "cpu"


def fsdp_is_root(unit: Any) -> bool:
    return bool(unit._get_fsdp_state()._is_root)


def fsdp_output_dtype(unit: Any) -> torch.dtype | None:
    """The dtype to which a unit casts the outputs of its forward."""
    dtype: torch.dtype | None = unit._get_fsdp_state()._mp_policy.output_dtype
    return dtype


def fsdp_around_outputs(unit: Any, wrap: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """Call ``wrap(original, outputs)`` where FSDP registers hooks on ``outputs`` that gather the unit in backward."""
    state = unit._get_fsdp_state()
    state._register_pre_backward_hook = functools.partial(wrap, state._register_pre_backward_hook)


def fsdp_around_backward(
    state: Any,
    begin: Callable[[bool, Callable[[], None]], None],
    end: Callable[[Callable[[], None]], None],
) -> Callable[[], None]:
    """Call ``begin(is_first, original)`` when a backward reaches a unit, and ``end(original)`` as its final callback.

    ``is_first``: no unit of the model was reached before in this backward. The returned function says that one is
    reached: FSDP does not say it in a backward of gradients, which passes no output.
    """
    register, finish = state._register_root_post_backward_final_callback, state._root_post_backward_final_callback

    def registered() -> None:
        begin(not state._state_ctx.post_backward_final_callback_queued, register)

    state._register_root_post_backward_final_callback = registered
    state._root_post_backward_final_callback = functools.partial(end, finish)
    return registered


def fsdp_has_gradient(parameter: FSDPParam) -> bool:
    """Whether the gathered parameter has a gradient on this rank. It exists only after its unit has run."""
    whole = getattr(parameter, "_unsharded_param", None)
    return whole is not None and (whole.grad is not None or parameter.unsharded_accumulated_grad is not None)


def fsdp_shown(groups: Iterable[FSDPParamGroup]) -> dict[nn.Parameter, nn.Parameter]:
    """{gathered parameter: its shard} for all parameters that were ever gathered."""
    known = [one for group in groups for one in group.fsdp_params]
    return {one._unsharded_param: one.sharded_param for one in known if hasattr(one, "_unsharded_param")}


def fsdp_reduce_unused(root: Any) -> bool:
    """Let ranks reduce zeros for parameters not used in a backward: all ranks must call the same collectives.

    False before torch 2.13, which lacks this option: then call ``fsdp_fill_unused`` before each reduction.
    """
    if not hasattr(root, "set_reduce_scatter_unused_params"):
        return False
    root.set_reduce_scatter_unused_params(True)
    return True


def fsdp_fill_unused(group: FSDPParamGroup) -> None:
    """Set zero gradients on the gathered parameters of ``group`` that have no gradient."""
    for one in group.fsdp_params:
        if hasattr(one, "_unsharded_param") and one.unsharded_param.requires_grad and not fsdp_has_gradient(one):
            one.unsharded_param.grad = torch.zeros_like(one.unsharded_param)


def fsdp_recover(root: Any) -> None:
    """Reset the state after a forward that raised: parameters become shards again, and the next forward may begin."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    state = root._get_fsdp_state()
    state._comm_ctx.all_gather_state = None
    state._comm_ctx.post_forward_order.clear()
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = type(each._training_state).IDLE
        for group in fsdp_groups(each):
            _recover_group(group)
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def _recover_group(group: Any) -> None:
    gathered, group._all_gather_result = group._all_gather_result, None
    if getattr(gathered, "all_gather_work", None) is not None:
        gathered.all_gather_work.wait()
    group._partial_reduce_output = None
    group._post_forward_indices.clear()
    group._training_state = type(group._training_state).IDLE
    group._to_sharded()


def fsdp_gathered(parameter: FSDPParam) -> Any:
    """The gathered parameter. It exists after the first forward of its unit has begun."""
    return parameter._unsharded_param


def fsdp_place(parameter: FSDPParam) -> set[tuple[nn.Module, str]]:
    """The modules that have the parameter, each with its name there."""
    info = parameter._module_info
    return {(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)}


def fsdp_is(parameter: FSDPParam, one: nn.Parameter | None) -> bool:
    """Whether ``one`` is a form of the parameter: its shard, gathered, or resharded to fewer ranks."""
    forms = (getattr(parameter, name, None) for name in ("_unsharded_param", "_sharded_post_forward_param"))
    return one is parameter.sharded_param or (one is not None and any(one is form for form in forms))


def fsdp_around_forward(group: FSDPParamGroup, begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Call ``begin`` when ``group`` is gathered for a forward, and ``end`` when that is over, before it is freed."""
    gather, free, own = group.pre_forward, group.post_forward, vars(group)

    def pre_forward(*args: Any) -> Any:
        found = gather(*args)
        begin()
        return found

    def post_forward(*args: Any) -> Any:
        end()
        return free(*args)

    own.update(pre_forward=pre_forward, post_forward=post_forward)
