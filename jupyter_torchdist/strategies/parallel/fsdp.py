"""Fully sharded data parallelism: PyTorch's ``fully_shard``, in place, unit by unit.

Parameters become DTensors, sharded over ``dp_shard`` (and replicated over ``dp_replicate``). The model's classes, names
and objects stay the same. All options of Hugging Face's page on FSDP are supported under their names
(https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html describes what each part does).
"""

from __future__ import annotations

import itertools
import re
import traceback
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from ...protocol.errors import StrategyError
from ...protocol.options.strategy import chosen
from ...protocol.strategy import StrategyPlan
from ...torch_private.fully_shard import fsdp_around_outputs, fsdp_begin, fsdp_output_dtype, replicate_with_fsdp
from ..core import blocks, loading
from ..core.agreement import check_untouched
from ..core.context import ParallelContext
from ..core.outputs import changed, closed, opened
from ..core.ownership import INSTEAD_OF_A_COPY, own_class
from ..core.scatter import map_tensors, tensors_in
from ..sharded.unsharded import groups_of, units_in
from ..step.gradients import average_after_backward
from .unused import agree_on_use

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

ENOUGH = 1_000_000
"""The minimum number of parameter elements in a unit, for a model without repeated blocks."""

SMALL = 64
"""The maximum number of elements of the root module's own vectors that are not sharded."""


def check(model: nn.Module, context: ParallelContext) -> None:
    """Raise ``StrategyError`` for a model that cannot be sharded as the plan says."""
    check_untouched(model)
    units(model, context.plan)
    _check_dtypes(model, context.plan)


def apply(model: nn.Module, context: ParallelContext, forward_methods: Collection[str] = ()) -> None:
    """Shard ``model`` in place. All ranks must call it.

    ``forward_methods``: names of other methods than ``forward`` that will be called on the model itself.
    """
    plan, group, device = context.plan, context.data_group, context.device
    weights: dict[str, Tensor] | None = None
    if loading.someone_lacks_weights(model, group, device) or chosen(plan, "cpu_ram_efficient_loading"):
        weights = loading.set_aside(model, group)
    elif chosen(plan, "sync_module_states"):
        loading.broadcast_states(model, group, device)
    sharded = _shard(model, context)
    if weights is not None:
        home = torch.device("cpu") if chosen(plan, "cpu_offload") else device
        loading.hand_out(model, weights, group, device, home)
    _leave_whole(model, context)
    _settle(model)
    agree_on_use(model, context)
    _prefetch(sharded, context)
    for method in forward_methods:
        register_fsdp_forward_method(model, method)


def shard_alone(model: nn.Module, context: ParallelContext) -> None:
    """Shard a model without values, whose gradients are not used. No communication; no value is read."""
    sharded = _shard(model, context)
    _settle(model)
    _prefetch(sharded, context)


def units(model: nn.Module, plan: StrategyPlan) -> list[list[nn.Module]]:
    """The FSDP units in the order of definition. The root holds the other parameters and is not in the list.

    A unit is a group of modules that are gathered together: one module, or several that share a parameter. Raises
    ``StrategyError`` for classes that are not in the model.
    """
    policy = chosen(plan, "auto_wrap_policy")
    names = chosen(plan, "transformer_layer_cls_to_wrap")
    if policy == "NO_WRAP":
        wanted = []
    elif policy == "SIZE_BASED_WRAP":
        wanted = blocks.by_size(model, chosen(plan, "min_num_params"))
    elif policy == "TRANSFORMER_BASED_WRAP" or names:
        wanted = blocks.of_classes(model, names) if names else _named_by_the_model(model)
    else:
        wanted = blocks.repeated(model) or blocks.by_size(model, ENOUGH)
    return _with_ties_together(model, wanted)


def _named_by_the_model(model: nn.Module) -> list[nn.Module]:
    """Modules of the classes in a Transformers model's ``_no_split_modules``, as in accelerate; or repeated blocks."""
    names = getattr(model, "_no_split_modules", None)
    return blocks.of_classes(model, [*names]) if names else blocks.repeated(model)


def _with_ties_together(model: nn.Module, wanted: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Units that do not share parameters: siblings with a shared parameter are joined, nested units are dissolved."""
    order = {module: position for position, module in enumerate(model.modules())}
    group_of = {module: [module] for module in wanted}
    changed = True
    while changed:
        changed = False
        home = _homes(model, group_of)
        for places in loading.slots(model).values():
            homes = sorted({home[module] for module, _ in places}, key=order.__getitem__)
            first = homes[0]
            for other in homes[1:]:
                if first is model or other in set(first.modules()):
                    changed = bool([group_of.pop(module) for module in list(group_of[other])]) or changed
                    break
                if group_of[first] is not group_of[other]:
                    group_of[first].extend(group_of[other])
                    group_of.update(dict.fromkeys(group_of[other], group_of[first]))
    unique = {id(group): sorted(group, key=order.__getitem__) for group in group_of.values()}
    return sorted(unique.values(), key=lambda group: order[group[0]])


def _homes(model: nn.Module, chosen_units: Collection[nn.Module]) -> dict[nn.Module, nn.Module]:
    """The unit that each module belongs to, or the model itself."""
    home = {model: model}
    for module in model.modules():
        for child in module.children():
            home.setdefault(child, child if child in chosen_units else home[module])
    return home


def _shard(model: nn.Module, context: ParallelContext) -> list[list[nn.Module]]:
    """Apply ``fully_shard`` bottom up: inner units first, the root last."""
    inner, last = _precision(context.plan)
    shared: dict[str, Any] = {
        "offload_policy": _offload(context),
        "ignored_params": set(_left_whole(model, context.plan)),
    }
    _make_contiguous(model, context)
    found = units(model, context.plan)
    reshard = _reshard(context.plan)
    for group in reversed(found):
        _wrap(group[0] if len(group) == 1 else group, context, reshard, {**shared, "mp_policy": inner})
    _wrap(model, context, None if reshard is True else reshard, {**shared, "mp_policy": last})
    for module in units_in([model]):
        type(module).__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]  # torch created this class
    return found


def _wrap(target: Any, context: ParallelContext, reshard: bool | int | None, options: dict[str, Any]) -> None:
    if chosen(context.plan, "sharding_strategy") == "NO_SHARD":
        replicate_with_fsdp(target, mesh=_one_dimension(context), **options)
    else:
        fully_shard(target, mesh=_mesh(context), reshard_after_forward=reshard, **options)
    unit = target[0] if isinstance(target, list) else target
    fsdp_around_outputs(unit, partial(_hook_what_is_its_own, fsdp_output_dtype(unit)))


def _hook_what_is_its_own(dtype: torch.dtype | None, register: Callable[[Any], Any], outputs: Any) -> Any:
    """Cast outputs to ``dtype`` and copy views: an in-place change of a view removes torch's hook from it.

    Without the hook the unit's parameters are not gathered for its backward. ``_register_pre_backward_hook`` in
    ``torch.distributed.fsdp._fully_shard._fsdp_state`` warns of it.
    """
    parts = opened(outputs)  # torch does not hook or cast tensors inside of objects
    tensors = tensors_in(parts)
    own = [tensor if tensor._base is None else tensor.clone() for tensor in tensors]
    hooked = dict(zip(map(id, tensors), register(own), strict=True))
    if any(hooked[id(tensor)] is not tensor for tensor in tensors):
        outputs = closed(map_tensors(parts, lambda tensor: hooked[id(tensor)]))
    return outputs if dtype is None else changed(outputs, partial(_cast, dtype))


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _mesh(context: ParallelContext) -> DeviceMesh:
    if context.plan.degree("dp_replicate") > 1:
        return context.mesh["dp_replicate", "dp_shard"]
    return context.mesh["dp_shard"]


def _one_dimension(context: ParallelContext) -> DeviceMesh:
    for name, other in (("dp_shard", "dp_replicate"), ("dp_replicate", "dp_shard")):
        if context.plan.degree(other) == 1:
            return context.mesh[name]
    return context.data_mesh


def _reshard(plan: StrategyPlan) -> bool | int:
    if chosen(plan, "sharding_strategy") in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"):
        return False
    return chosen(plan, "reshard_after_forward")  # type: ignore[no-any-return]


def _precision(plan: StrategyPlan) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """The policies of inner units and of the root. Gradients are reduced in fp32, and the model's outputs are fp32."""
    dtype = DTYPES.get(plan.precision)
    if dtype is None:
        return MixedPrecisionPolicy(), MixedPrecisionPolicy()
    return (
        MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=torch.float32),
    )


def _offload(context: ParallelContext) -> OffloadPolicy:
    if not chosen(context.plan, "cpu_offload"):
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=context.device.type != "cpu")  # pinning needs an accelerator


def _make_contiguous(model: nn.Module, context: ParallelContext) -> None:
    """``fully_shard`` takes only contiguous parameters, so others (channels-last weights) are stored contiguously."""
    odd = [name for name, parameter in model.named_parameters() if not parameter.is_contiguous()]
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    if odd:
        context.say(f"fsdp: {odd[0]} and {len(odd) - 1} other parameters are stored contiguously when sharded")


def _left_whole(model: nn.Module, plan: StrategyPlan) -> list[nn.Parameter]:
    """Parameters that are not sharded: 0-dim and complex ones, and the root's small vectors.

    ``fully_shard`` cannot shard a scalar. Of a complex shard, optimizers change a copy if other ranks have larger
    shards. Cells use the vectors outside of the forward (``agent.log_std.exp()``), where a shard does not work. With
    mixed precision they are sharded like the others, because FSDP casts only gathered parameters.
    """
    scalars = [one for one in model.parameters() if not _can_be_sharded(one)]
    if plan.precision in DTYPES or not any(True for child in model.children() for _ in child.parameters()):
        return scalars
    inside = {parameter for child in model.children() for parameter in child.parameters()}
    own = [one for one in model.parameters(recurse=False) if one.ndim == 1 and one not in inside]
    return scalars + [one for one in own if one.numel() <= SMALL]


def _can_be_sharded(parameter: nn.Parameter) -> bool:
    return parameter.ndim > 0 and not parameter.is_complex()


def _leave_whole(model: nn.Module, context: ParallelContext) -> None:
    """Move parameters that are not sharded to the device and average their gradients after each backward."""
    whole = _left_whole(model, context.plan)
    for parameter in whole:
        parameter.data = parameter.data.to(context.device)
    if whole:
        average_after_backward(model, whole, context.data_group)


def _settle(model: nn.Module) -> None:
    """Make ``model`` the FSDP root now, and free gathered parameters when they are not needed any more.

    A root (and with ZeRO-2 every unit) stays gathered after a forward. Without a backward the next forward would use
    old values after an optimizer step, and writes to ``model.parameters()`` would go to copies.
    """
    fsdp_begin(model)
    groups = list(groups_of(units_in([model])))

    def forget(*_: object) -> None:
        for group in groups:
            if not group.is_sharded:
                group.reshard()

    def forget_after_evaluation(*_: object) -> None:
        if not torch.is_grad_enabled():
            forget()

    model.register_forward_pre_hook(forget, prepend=True)
    model.register_forward_hook(forget_after_evaluation)


def _prefetch(sharded: list[list[nn.Module]], context: ParallelContext) -> None:
    """Set prefetching. By default FSDP2 prefetches one unit in backward on a GPU; options add to it or disable it."""
    order = [group[0] for group in sharded]
    if chosen(context.plan, "forward_prefetch"):
        for module, following in itertools.pairwise(order):
            module.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
    how = chosen(context.plan, "backward_prefetch")
    if how == "BACKWARD_POST":
        context.say("fsdp: backward_prefetch=BACKWARD_POST has no counterpart in FSDP2; runs as NO_PREFETCH")
    if how in ("BACKWARD_POST", "NO_PREFETCH"):
        for module in order:
            module.set_modules_to_backward_prefetch([module])  # type: ignore[operator]  # only itself: no prefetch


def _check_dtypes(model: nn.Module, plan: StrategyPlan) -> None:
    """The trained parameters of a unit must have one dtype, because they are communicated in one buffer."""
    home = _homes(model, {group[0] for group in units(model, plan)})
    seen: dict[nn.Module, tuple[str, torch.dtype]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(f"{module_name}".strip("."), recurse=False):
            if parameter.requires_grad and _can_be_sharded(parameter):
                first, dtype = seen.setdefault(home[module], (name, parameter.dtype))
                if dtype != parameter.dtype:
                    raise StrategyError(
                        f"{first} ({dtype}) and {name} ({parameter.dtype}) are trained in one unit of fsdp",
                        "give the model one dtype (and --precision bf16), or freeze one of them, or use ddp",
                    )


def explain(error: BaseException) -> StrategyError | None:
    """Explains an error of torch when a sharded model is used without calling it; None for another error."""
    if isinstance(error, StrategyError):
        return None
    first = next(iter(str(error).splitlines()), "")
    before = OF_PLAIN_ONES.search(first)
    if (before or "got mixed" in first) and in_backward(error):
        needed = (
            "this backward needs parameters as they were before the model's first call, which sharded them"
            if before
            else "a part of this loss was computed from shards of parameters, and another part from gathered parameters"
        )
        return StrategyError(
            f"{needed} ({type(error).__name__}: {first:.160})",
            "compute the part of the loss that uses parameters (a penalty) after model(x), or use --strategy ddp",
        )
    if not any(words in str(error) for words in _OF_SHARDS):
        return None
    return StrategyError(
        "a parameter sharded by fsdp or tp was used outside of the forward of the module it belongs to, where this "
        f"operation sees only a shard of it ({type(error).__name__}: {first:.160})",
        "call the module itself (model(x)); other methods than forward see only shards: move their code into "
        "forward, or use --strategy ddp. Logits that -O loss_parallel=1 leaves split can only go into cross_entropy",
    )


def in_backward(error: BaseException) -> bool:
    """Outside of a backward, sizes that do not match have other causes, for example a batch without samples."""
    return any(frame.name == "_engine_run_backward" for frame in traceback.extract_tb(error.__traceback__))


OF_PLAIN_ONES = re.compile(r"The size of tensor [ab] \(0\) must match|must match the size of tensor b \(0\)")
"""Errors about parameters from before sharding: tensors that autograd saved of them have no elements."""
_OF_SHARDS = ("DTensor", "Sharding propagation", "sharding strategy registered", "DeviceMesh", "for storage of size 0")


def _refuse_copy(module: nn.Module, _memo: object) -> NoReturn:
    raise StrategyError(
        f"copy.deepcopy of {own_class(module).__name__}, which is sharded: a copy could not gather its parameters",
        INSTEAD_OF_A_COPY,
    )
