"""Operations on plain tensors and shards: averages, masks and copies of weights, made before these were sharded.

PyTorch refuses to compute with both. In elementwise operations a plain tensor that broadcasts to the parameter's shape
is the same on every rank, so it is sharded like the parameter, without communication. If the plain tensor is written
to, or requires gradients (a gathered parameter), the shards are gathered instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...torch_private.autograd import in_backward
from ..core.dtensors import Handler, as_ever, divided_as, in_full, whole, write_in_full

_ELEMENT_BY_ELEMENT = (
    *("add", "sub", "rsub", "mul", "div", "pow", "lerp", "addcmul", "addcdiv", "copy", "maximum", "minimum", "where"),
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "masked_fill"),
)


def handlers() -> dict[Any, Handler]:
    """The handlers that run in place of DTensor's dispatch, by operation."""
    return dict.fromkeys(_operations(), _compute)


def _operations() -> Iterator[Any]:
    """Elementwise operations with several tensors: out of place and in place, for tensors and for lists."""
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
    """In place of DTensor's dispatch, for arguments that it refuses; DTensor does all others."""
    if operation._schema.is_mutable and isinstance(args[0], Tensor) and not isinstance(args[0], DTensor):
        return write_in_full(operation, args, kwargs)
    if _is_plain(args) or _is_plain(kwargs.values()):
        args, kwargs = _alike(args, kwargs, written=operation._schema.is_mutable)
    try:
        return as_ever(operation, args, kwargs, _compute)
    except RuntimeError as error:
        if not isinstance(args[0], Tensor) or not any(words in str(error) for words in _OF_OTHER_SHARDS):
            raise
        return (write_in_full if operation._schema.is_mutable else in_full)(operation, args, kwargs)


_OF_OTHER_SHARDS = ("in-place operations that require placement changes", "with different meshes")
"""Errors when a row is written to all other rows, or when only some parameters in a norm are split by tp."""


def _is_plain(values: Iterable[Any]) -> bool:
    """Whether any value is a plain tensor with several elements, or a list that begins with one."""
    firsts = (one[0] if isinstance(one, (list, tuple)) and one else one for one in values)
    return any(isinstance(one, Tensor) and not isinstance(one, DTensor) and one.numel() > 1 for one in firsts)


def _alike(args: Sequence[Any], kwargs: dict[str, Any], *, written: bool) -> tuple[Sequence[Any], dict[str, Any]]:
    """Arguments of one kind (all plain or all sharded), if the plain ones broadcast to the shape of the shards.

    ``written``: the first is written to.
    """
    lists = [one for one in args if isinstance(one, (list, tuple))]
    if lists and isinstance(lists[0][0], Tensor):
        rows = [_alike([_at(one, row) for one in args], {}, written=written)[0] for row in range(len(lists[0]))]
        columns = zip(args, zip(*rows, strict=True), strict=True)
        return [list(column) if isinstance(one, (list, tuple)) else one for one, column in columns], kwargs
    tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.numel() > 1]
    shards = [one for one in tensors if isinstance(one, DTensor)]
    plain = [one for one in tensors if not isinstance(one, DTensor)]
    if not shards or not plain or not all(_broadcasts(one.shape, shards[0].shape) for one in plain):
        return args, kwargs
    if written or in_backward():  # in a backward the gradient is the first
        gathers = args[0] is plain[0]
    else:
        gathers = torch.is_grad_enabled() and any(one.requires_grad for one in plain)

    def alike(one: Any) -> Any:
        if gathers:
            return whole(one) if isinstance(one, DTensor) else one
        if any(one is other for other in plain):
            return divided_as(one.expand(shards[0].shape), shards[0])
        return one

    return [alike(one) for one in args], {name: alike(one) for name, one in kwargs.items()}


def _broadcasts(shape: torch.Size, full: torch.Size) -> bool:
    behind = full[len(full) - len(shape) :]
    return len(shape) <= len(full) and all(size in (1, other) for size, other in zip(shape, behind, strict=True))


def _at(argument: Any, place: int) -> Any:
    return argument[place] if isinstance(argument, (list, tuple)) else argument
