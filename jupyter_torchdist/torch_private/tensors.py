"""Tensors, their subclasses, and operations on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

GROUPED_MM = torch.ops.aten._grouped_mm.default
ITEM = torch.ops.aten._local_scalar_dense.default
TENSOR_FILE: str = torch._tensor.__file__
VF = torch._VF
"""The namespace through which ``torch.nn`` calls its recurrent functions."""

copy_all: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_copy_
"""(targets, sources): copies each source into the target at the same index."""
unscale_all: Callable[[list[Tensor], Tensor, Tensor], None] = torch._amp_foreach_non_finite_check_and_unscale_
"""(gradients, flag, factor): multiplies in place, and sets the flag if a gradient is not finite."""
norms: Callable[[list[Tensor], float], tuple[Tensor, ...]] = torch._foreach_norm
"""(tensors, order): the norm of each."""
parse_to = torch._C._nn._parse_to
"""Parses the arguments of ``Tensor.to`` into (device, dtype, non_blocking, memory_format)."""
make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
make_subclass: Callable[..., Any] = torch.Tensor._make_subclass


def all_finite(tensors: list[Tensor]) -> bool:
    """Whether floating-point tensors on the CPU hold neither NaN nor infinity.

    Parts of a few whole tensors, as gradients in buckets are: a finite sum of each whole one says so. Else one call for
    all of them: the kernel of gradient scalers also multiplies, here by 1, so it writes what it has read. Through
    ``data`` that is no change to autograd. Raises ``RuntimeError`` for a tensor whose elements share memory.
    """
    bases = [base for one in tensors if (base := one._base) is not None and base.dtype is one.dtype]
    wholes = {id(base): base for base in bases}.values()
    if len(bases) == len(tensors) and 4 * len(wholes) <= len(tensors):
        little = sum(map(Tensor.numel, wholes)) <= 2 * sum(map(Tensor.numel, tensors))
        if little and all(map(_has_finite_sum, wholes)):
            return True
    found = torch.zeros(1)
    unscale_all([one.data for one in tensors], found, torch.ones(1))
    return not found.item()


def _has_finite_sum(tensor: Tensor) -> bool:
    """It may be infinite although no element is."""
    return math.isfinite(tensor.detach().sum(dtype=torch.promote_types(tensor.dtype, torch.float32)).item())


def storage_references(tensor: Tensor) -> int:
    """The reference count of the storage of ``tensor``."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements of ``tensor`` fill its memory without gaps, in any order of dimensions."""
    prims: Any = torch._prims_common
    ask = getattr(prims, "is_non_overlapping_and_dense_or_false", None) or prims.is_non_overlapping_and_dense
    return bool(ask(tensor))


def has_own_dispatch(kind: type) -> bool:
    """Whether a subclass of ``Tensor`` has its own ``__torch_dispatch__`` (a wrapper without own memory)."""
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]


def is_functional(tensor: Tensor) -> bool:
    """Whether ``torch.func.functionalize`` created the tensor."""
    return torch._is_functional_tensor(tensor)


def restore_parametrized_class(module: nn.Module) -> None:
    """Restore the class of a parametrized module, which pickling loses. Its properties compute the module's tensors."""
    from torch.nn.utils import parametrize

    parametrize._inject_new_class(module)
    for name in module.parametrizations:  # type: ignore[union-attr]
        parametrize._inject_property(module, name)


_UNTAGGED = frozenset({"celu", "elu", "hardsigmoid", "hardtanh", "leaky_relu", "selu"})
"""Element-wise operators without the tag ``pointwise`` before torch 2.12 (in place; ``leaky_relu`` in both forms)."""


def is_pointwise(operation: Any) -> bool:
    """Whether an operator is element-wise. Some in-place variants lack the tag of their functional variant."""
    name = operation._schema.name.removeprefix("aten::").removesuffix("_")
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    tagged = any(torch.Tag.pointwise in one.tags for one in (operation, *overloads))
    return operation.namespace == "aten" and (tagged or name in _UNTAGGED)
