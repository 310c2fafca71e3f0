"""Plain tensors of the cell's that meet shards: averages, masks and copies of weights, made before these were sharded.

PyTorch refuses to compute with both. Element by element, what is as large as the whole parameter is the same on every
rank: it is cut as the parameter is, without a word to other ranks. What is written to such a tensor, or computed with
one that asks for gradients (a gathered parameter), is gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...protocol.strategy import StrategyPlan
from .dtensors import whole
from .patches import Patches

_ELEMENT_BY_ELEMENT = (
    *("add", "sub", "rsub", "mul", "div", "pow", "lerp", "addcmul", "addcdiv", "copy", "maximum", "minimum", "where"),
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "masked_fill"),
)


def install(patches: Patches, plan: StrategyPlan) -> None:
    """For the time of user code. Not under ``tp``, whose forward computes with shards: it would take longer.

    So would the steps of PyTorch's own optimizers, which mix nothing: a third, where they go parameter by parameter.
    """
    if plan.degree("tp") > 1:
        return
    without = _handlers()
    ours = {operation: _compute for operation in _operations() if operation not in without}
    patches.replace(_dispatcher(), "_custom_op_handlers", lambda known: ours | known)
    mixing = _handlers()

    def begins(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _mixes_nothing(optimizer, *args[1:], **kwargs):
            _dispatcher()._custom_op_handlers = without

    def ends(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _dispatcher()._custom_op_handlers = mixing

    patches.hook(register_optimizer_step_pre_hook(begins))
    patches.hook(register_optimizer_step_post_hook(ends))


def _mixes_nothing(optimizer: Optimizer, closure: Any = None, **_: Any) -> bool:
    """Whether what a step computes with is the optimizer's own; a closure and hooks are the cell's."""
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return closure is None and not hooked and type(optimizer).__module__.startswith("torch.optim.")


def _dispatcher() -> Any:
    return DTensor._op_dispatcher


def _handlers() -> dict[Any, Any]:
    handlers: dict[Any, Any] = _dispatcher()._custom_op_handlers
    return handlers


def _operations() -> Iterator[Any]:
    """Those of several tensors, new and in place, of one and of lists."""
    for name in (
        f"{before}{one}{after}" for one in _ELEMENT_BY_ELEMENT for before in ("", "_foreach_") for after in ("", "_")
    ):
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            operation = getattr(packet, overload)
            given = operation._schema.arguments
            if sum("Tensor" in str(one.type) for one in given) > 1 and not any(one.is_out for one in given):
                yield operation


def _compute(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """In place of what DTensor does; it does all else."""
    if _is_plain(args) or _is_plain(kwargs.values()):
        args, kwargs = _alike(args, kwargs, written=operation._schema.is_mutable)
    handlers = _handlers()
    handlers.pop(operation, None)  # another thread (a save) may be here, too
    try:
        return operation(*args, **kwargs)
    finally:
        handlers[operation] = _compute


def _is_plain(values: Iterable[Any]) -> bool:
    """Whether any of them is a plain tensor of several numbers, or a list that begins with one."""
    firsts = (one[0] if isinstance(one, (list, tuple)) and one else one for one in values)
    return any(isinstance(one, Tensor) and not isinstance(one, DTensor) and one.numel() > 1 for one in firsts)


def _alike(args: Sequence[Any], kwargs: dict[str, Any], *, written: bool) -> tuple[Sequence[Any], dict[str, Any]]:
    """Arguments of one kind, where they are as large. ``written``: what the first holds is changed."""
    lists = [one for one in args if isinstance(one, (list, tuple))]
    if lists and isinstance(lists[0][0], Tensor):
        rows = [_alike([_at(one, row) for one in args], {}, written=written)[0] for row in range(len(lists[0]))]
        columns = zip(args, zip(*rows, strict=True), strict=True)
        return [list(column) if isinstance(one, (list, tuple)) else one for one, column in columns], kwargs
    tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.numel() > 1]
    shards = [one for one in tensors if isinstance(one, DTensor)]
    plain = [one for one in tensors if not isinstance(one, DTensor)]
    if not shards or not plain or any(one.shape != shards[0].shape for one in plain):
        return args, kwargs
    if written or torch._C._current_graph_task_id() != -1:  # a gradient comes first
        gathers = args[0] is plain[0]
    else:
        gathers = torch.is_grad_enabled() and any(one.requires_grad for one in plain)
    placements = [Replicate() if one.is_partial() else one for one in shards[0].placements]

    def alike(one: Any) -> Any:
        if gathers:
            return whole(one) if isinstance(one, DTensor) else one
        if any(one is other for other in plain):
            return distribute_tensor(one.detach(), shards[0].device_mesh, placements, src_data_rank=None)
        return one

    return [alike(one) for one in args], {name: alike(one) for name, one in kwargs.items()}


def _at(argument: Any, place: int) -> Any:
    return argument[place] if isinstance(argument, (list, tuple)) else argument
