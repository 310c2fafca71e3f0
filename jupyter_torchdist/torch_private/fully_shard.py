"""The inside of ``fully_shard``."""

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
    """FSDP2's own way to replicate a model, in place; not before 2.9 (``releases.check_plan``)."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(*args, **kwargs)


def fsdp_state(unit: Any) -> Any:
    """What ``fully_shard`` knows of a module that it wrapped, with its root's state made if need be."""
    return unit._get_fsdp_state()


def fsdp_states(root: Any) -> list[Any]:
    """The states of all units of ``root``, each once: before 2.12 one of several modules is listed for each of them."""
    return list(dict.fromkeys(root._get_fsdp_state()._state_ctx.all_states))


def fsdp_groups(state: Any) -> list[FSDPParamGroup]:
    """The parameters of a unit that are gathered together; several a unit from 2.12 on."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def fsdp_begin(root: Any) -> None:
    """Make ``root`` the root of its units now, and not at its first forward."""
    root._get_fsdp_state()._lazy_init()
    if release() < (2, 9):  # Gloo sums where it is asked for a mean
        for group in (group for state in fsdp_states(root) for group in fsdp_groups(state)):
            group.force_sum_reduction_for_comms = group.device.type == "cpu"


def fsdp_is_root(unit: Any) -> bool:
    return bool(unit._get_fsdp_state()._is_root)


def fsdp_output_dtype(unit: Any) -> torch.dtype | None:
    """To which a unit casts what its forward gives."""
    dtype: torch.dtype | None = unit._get_fsdp_state()._mp_policy.output_dtype
    return dtype


def fsdp_around_outputs(unit: Any, wrap: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """``wrap(original, outputs)`` in place of what lets a backward through ``outputs`` gather the unit."""
    state = unit._get_fsdp_state()
    state._register_pre_backward_hook = functools.partial(wrap, state._register_pre_backward_hook)


def fsdp_around_backward(
    state: Any,
    begin: Callable[[bool, Callable[[], None]], None],
    end: Callable[[Callable[[], None]], None],
) -> None:
    """``begin(is_first, original)`` when a backward reaches a unit; ``end(original)`` in place of its end at the root.

    ``is_first``: no unit of the model was reached before in this backward.
    """
    register, finish = state._register_root_post_backward_final_callback, state._root_post_backward_final_callback

    def registered() -> None:
        begin(not state._state_ctx.post_backward_final_callback_queued, register)

    state._register_root_post_backward_final_callback = registered
    state._root_post_backward_final_callback = functools.partial(end, finish)


def fsdp_has_gradient(parameter: FSDPParam) -> bool:
    """Whether a backward on this rank left a gradient of a gathered parameter, which appears when its unit runs."""
    whole = getattr(parameter, "_unsharded_param", None)
    return whole is not None and (whole.grad is not None or parameter.unsharded_accumulated_grad is not None)


def fsdp_shown(groups: Iterable[FSDPParamGroup]) -> dict[nn.Parameter, nn.Parameter]:
    """{gathered parameter: its shard} of what was ever gathered."""
    known = [one for group in groups for one in group.fsdp_params]
    return {one._unsharded_param: one.sharded_param for one in known if hasattr(one, "_unsharded_param")}


def fsdp_reduce_unused(root: Any) -> bool:
    """Let ranks reduce zeros for what they left out of a backward, or else they would not meet.

    False before 2.13, which cannot: then ``fsdp_fill_unused`` is called before each reduction.
    """
    if not hasattr(root, "set_reduce_scatter_unused_params"):
        return False
    root.set_reduce_scatter_unused_params(True)
    return True


def fsdp_fill_unused(group: FSDPParamGroup) -> None:
    """Zeros as gradients of the gathered parameters of ``group`` that have none."""
    for one in group.fsdp_params:
        if hasattr(one, "_unsharded_param") and one.unsharded_param.requires_grad and not fsdp_has_gradient(one):
            one.unsharded_param.grad = torch.zeros_like(one.unsharded_param)


def fsdp_recover(root: Any) -> None:
    """After a forward that raised: parameters are shards, and the next forward may begin."""
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
