"""Plain tensors of the cell's that meet shards: averages, masks and copies of weights, made before these were sharded.

PyTorch refuses to compute with both. Element by element, what is as large as the whole parameter is the same on every
rank: it is cut as the parameter is, without a word to other ranks. What is written to such a tensor, or computed with
one that asks for gradients (a gathered parameter), is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from .dtensors import whole
from .patches import Patches

_BINARY = ("add", "sub", "mul", "div", "truediv", "pow")
_ELEMENT_BY_ELEMENT = frozenset(
    {
        *_BINARY,
        *(f"r{name}" for name in _BINARY),
        *(f"i{name}" for name in _BINARY),
        *("true_divide", "lerp", "addcmul", "addcdiv", "copy", "maximum", "minimum", "where", "masked_fill"),
        *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "mse_loss", "l1_loss"),
        *(f"foreach_{name}" for name in ("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "copy")),
    }
)  # fmt: skip


def install(patches: Patches) -> None:
    """For the time of user code."""
    patches.put(DTensor, "__torch_function__", classmethod(_function))


def _function(
    cls: type, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    kwargs = kwargs or {}
    with torch._C.DisableTorchFunctionSubclass():
        name = getattr(func, "__name__", "")
        if name.strip("_") in _ELEMENT_BY_ELEMENT:
            args, kwargs = _alike(args, kwargs, written=name.endswith("_") and (name[:2] != "__" or name[2] == "i"))
        return func(*args, **kwargs)


def _alike(args: Sequence[Any], kwargs: dict[str, Any], *, written: bool) -> tuple[Sequence[Any], dict[str, Any]]:
    """Arguments of one kind. ``written``: what the first holds is changed."""
    lists = [one for one in args if isinstance(one, (list, tuple))]
    if lists:
        rows = [_alike([_at(one, row) for one in args], kwargs, written=written) for row in range(len(lists[0]))]
        columns = zip(*(row for row, _ in rows), strict=True)
        return [
            list(column) if isinstance(one, (list, tuple)) else one for one, column in zip(args, columns, strict=True)
        ], kwargs
    given = [*args, *kwargs.values()]
    tensors = [one for one in given if isinstance(one, Tensor) and one.numel() > 1]
    shards = [one for one in tensors if isinstance(one, DTensor)]
    if not shards or len(shards) == len(tensors):
        return args, kwargs
    plain = [one for one in tensors if not isinstance(one, DTensor)]
    if any(one.shape != shards[0].shape for one in plain):
        return args, kwargs
    of_graphs = [torch.is_grad_enabled() and any(one.requires_grad for one in group) for group in (plain, shards)]
    if all(of_graphs):
        return args, kwargs
    gathers = of_graphs[0] or (written and args[0] is plain[0])
    placements = [Replicate() if one.is_partial() else one for one in shards[0].placements]

    def alike(one: Any) -> Any:
        if gathers:
            return whole(one) if isinstance(one, DTensor) else one
        if any(one is other for other in plain):
            return distribute_tensor(one, shards[0].device_mesh, placements, src_data_rank=None)
        return one

    return [alike(one) for one in args], {name: alike(one) for name, one in kwargs.items()}


def _at(argument: Any, place: int) -> Any:
    return argument[place] if isinstance(argument, (list, tuple)) else argument
