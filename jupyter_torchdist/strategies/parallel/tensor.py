"""Tensor parallelism: layers split over the ranks of ``tp`` by PyTorch's parallel styles, in place.

The parameters of split layers become DTensors. All others stay plain tensors, the same on all ranks. Between the split
layers the user's code sees whole plain tensors. See
https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ...protocol.errors import StrategyError
from ...protocol.options.strategy import chosen
from ...torch_private.places import enable_custom_loss_ops
from ..core import loading
from ..core.agreement import check_untouched
from ..core.context import ParallelContext
from ..step.views import no_view
from . import tensor_sequence
from .sequences import around_forward, refuse_copies
from .tensor_inside import split_inside
from .tensor_linear import ColwiseLinear, RowwiseLinear, entering, is_linear
from .tensor_plan import Styles, styles_of, written_for_parts

_OF_DDP = ("static_graph", "find_unused_parameters", "bucket_cap_mb", "gradient_as_bucket_view", "comm_hook", "zero1")


def check(model: nn.Module, context: ParallelContext) -> None:
    """Raise ``StrategyError`` for a model that cannot be split as the plan says."""
    check_untouched(model)
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise StrategyError(
            f"{type(model).__name__} is distributed already: some of its parameters are DTensors",
            "leave it to --strategy, or run your own distributed code with --strategy none",
        )
    if context.plan.degree("cp") > 1:
        raise StrategyError(
            "tp and cp divide the same attention, and are not built together", "use one of them, with fsdp or ddp"
        )
    if context.plan.degree("dp_replicate") > 1 and context.plan.degree("dp_shard") == 1:
        given = [name for name in _OF_DDP if context.plan.options.get(name)]
        if given:
            raise StrategyError(
                f"-O {given[0]} is of DDP's reducer; beside tp, FSDP2's replicate averages the gradients",
                "leave it out",
            )
    styles = styles_of(model, context)
    if chosen(context.plan, "sequence_parallel"):
        tensor_sequence.check(model, styles, context)
    if chosen(context.plan, "loss_parallel"):
        _check_loss(model, styles, context)


def apply(model: nn.Module, context: ParallelContext) -> None:
    """Split ``model`` in place over ``context.mesh["tp"]``, with rank 0's weights. All ranks must call it."""
    mesh, everybody = context.mesh["tp"], _everybody()
    styles = styles_of(model, context)
    weights = None
    if loading.someone_lacks_weights(model, everybody, context.device):
        weights = loading.set_aside(model, everybody)
    else:
        loading.broadcast_states(model, everybody, context.device)
    places = loading.slots(model)
    for parameter in places:
        if weights is None:
            parameter.data = parameter.data.to(context.device)
    split_loss = bool(chosen(context.plan, "loss_parallel"))
    head = head_of(model, styles) if split_loss else None
    local = written_for_parts(model, context)
    containers = {} if local else containers_of(model, styles)
    for name, style in styles.items():
        module = model.get_submodule(name)
        inside = containers.get(name) is not None
        how = _style(style, module, inside=inside, local=local, split=name == head)
        if how is not None:
            parallelize_module(module, mesh, how, src_data_rank=None)
            if not isinstance(how, (ColwiseLinear, RowwiseLinear)):
                module.register_forward_hook(_without_views)
        elif style == "replicate":
            _replicate(module, mesh)
        elif style == "summed":
            _sum_gradients(module, mesh.get_group())
    _tie_again(places, model)
    for name in dict.fromkeys([container for container in containers.values() if container is not None]):
        split_inside(model.get_submodule(name), mesh)
    tensor_sequence.apply(model, styles, context)
    if split_loss:
        _enable_split_loss()
    if weights is not None:
        loading.hand_out(model, weights, everybody, context.device, context.device)
    _settle_gradients(model)
    refuse_copies(model, "tp")
    split = sum(p.numel() for p in model.parameters() if isinstance(p, DTensor) and not p.placements[0].is_replicate())
    whole = sum(p.numel() for p in model.parameters())
    # Gathering parameters sharded by dp and tp takes two steps. torch warns of it each time, but it is intended.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    context.say(f"tp: {len(styles)} layers ({split / whole:.0%} of the parameters) are split over {mesh.size()} ranks")


def containers_of(model: nn.Module, styles: Styles) -> dict[str, str | None]:
    """For each colwise layer, the innermost module that also has a rowwise layer. Inside it tensors are split.

    None if only the model itself has one: then the layer's outputs are gathered at once.
    """
    rowwise = [name for name, style in styles.items() if style == "rowwise"]
    found: dict[str, str | None] = {}
    for name, style in styles.items():
        if style in ("colwise", "replicate", "sequence"):
            above = [name.rsplit(".", number)[0] for number in range(1, name.count(".") + 1)]
            found[name] = next((one for one in above if any(row.startswith(f"{one}.") for row in rowwise)), None)
            if style != "colwise":
                found[name] = None
    return found


def head_of(model: nn.Module, styles: Styles) -> str | None:
    """The last layer with gathered outputs, which are the outputs of the model."""
    found = [name for name, style in styles.items() if style == "gathered"]
    return found[-1] if found else None


def _style(style: str, module: nn.Module, *, inside: bool, local: bool, split: bool) -> ParallelStyle | None:
    """``inside``: the outputs are used as DTensors; ``local``: as this rank's local part; else as whole tensors."""
    if style == "embedding" or (style == "rowwise" and isinstance(module, nn.Embedding)):
        return RowwiseParallel(input_layouts=Replicate())
    if style == "rowwise" or (style == "colwise" and (inside or local)):
        if is_linear(module):
            return ColwiseLinear(use_local_output=local) if style == "colwise" else RowwiseLinear()
        return ColwiseParallel(use_local_output=local) if style == "colwise" else RowwiseParallel()
    if style in ("colwise", "gathered"):
        return ColwiseParallel(use_local_output=False) if split else ColwiseParallel(output_layouts=Replicate())
    return None


def _without_views(_module: nn.Module, _args: object, output: Any) -> Any:
    return output if isinstance(output, DTensor) else no_view(output)


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make the layer's parameters replicated DTensors, because the split layers around it use DTensors."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                whole = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=None)
                part._parameters[name] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    split_inside(module, mesh)


def _sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """The layer computes with this rank's heads only, so its gradients are summed over the ranks."""

    def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        own: dict[str, Any] = module._parameters
        kept = {name: one for name, one in own.items() if one is not None}
        own.update({name: entering(one, group) for name, one in kept.items()})
        try:
            return original(*args, **kwargs)
        finally:
            own.update(kept)

    around_forward(module, forward)


def _tie_again(places: Mapping[nn.Parameter, list[loading.Slot]], model: nn.Module) -> None:
    """Tie parameters again: one that is shared by several layers was split in each separately."""
    for slots in places.values():
        now: list[Any] = [module._parameters[name] for module, name in slots]
        if len({getattr(one, "placements", None) for one in now}) > 1:
            names = {id(module): name for name, module in model.named_modules()}
            tied = " and ".join(names[id(module)] for module, _ in slots)
            raise StrategyError(
                f"{tied} share a parameter, and tp would split it in several ways",
                "split both along the vocabulary (the head colwise, the embedding rowwise), or neither",
            )
        loading.put(slots, now[0])


def _settle_gradients(model: nn.Module) -> None:
    """Give each gradient the placements of its parameter, before anything reads it."""

    def settle(parameter: Any) -> None:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)

    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(settle)  # type: ignore[no-untyped-call]


def _check_loss(model: nn.Module, styles: Styles, context: ParallelContext) -> None:
    if context.data_ranks > 1:
        raise StrategyError(
            "loss_parallel returns logits that stay split over tp, and logits of several data ranks cannot be joined",
            "use --strategy tp alone, or leave loss_parallel out",
        )
    name = head_of(model, styles)
    if name is None:
        raise StrategyError(
            f"loss_parallel splits the outputs of a head, and tp splits no head in {type(model).__name__}",
            "a head is a linear layer with as many outputs as the embedding has rows",
        )
    head: Any = model.get_submodule(name)
    if head.out_features % context.plan.degree("tp"):
        raise StrategyError(
            f"loss_parallel: {context.plan.degree('tp')} ranks of tp do not divide the {head.out_features} outputs of "
            f"{name}",
            "choose -O tp=N that divides them, or leave loss_parallel out",
        )


def _enable_split_loss() -> None:
    """From now on ``F.cross_entropy`` of split logits computes on each rank's classes, forward and backward."""
    enable_custom_loss_ops()


def _everybody() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def explain(error: BaseException) -> StrategyError | None:
    """Explains an error of DTensor for code that it cannot compute; None for another error."""
    text = str(error)
    if isinstance(error, (RuntimeError, NotImplementedError)) and ("DTensor" in text or "sharding strategy" in text):
        return StrategyError(
            f"a layer that tp split is used in a way that cannot be computed on its parts: {text.splitlines()[0]}",
            "leave that layer whole: name the others with -O tp_plan=MODULE:STYLE,…",
        )
    return None
