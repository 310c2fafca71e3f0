"""Runs code written for whole tensors on DTensors inside one module. Before and after it tensors are plain."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.overrides import TorchFunctionMode

from ...torch_private.places import tree_map_only

_PARTS = {torch.split, torch.chunk, torch.Tensor.split, torch.Tensor.chunk}
"""Functions that cut fused projections into queries, keys and values."""

_PRODUCTS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}

_NOT_MIXED = {DTensor.from_local, DTensor.to_local, DTensor.redistribute, DTensor.full_tensor}


def split_inside(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let ``module`` compute with the DTensors over ``mesh`` that its layers return. It returns whole plain tensors.

    ``F.scaled_dot_product_attention`` runs on each rank's heads. Fused projections are cut so that each rank has its
    heads. Plain tensors used with DTensors count as replicated, because they are the same on all ranks.
    """
    original = module.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with _Beside(mesh):
            outputs = original(*args, **kwargs)
        return tree_map_only(DTensor, plain, outputs)

    forward.__module__ = __name__
    vars(module)["forward"] = forward


def plain(tensor: DTensor) -> torch.Tensor:
    """The whole tensor on every rank. Its gradient is also whole on every rank."""
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local()


def _first(values: Iterable[Any]) -> DTensor | None:
    """The first DTensor in the arguments of an operation. Called for every operation; few have one."""
    for value in values:
        if isinstance(value, DTensor):
            return value
        if isinstance(value, (list, tuple)) and (found := _first(value)) is not None:
            return found
    return None


def _are_split_alike(*factors: Any) -> bool:
    """Whether a product is split over its batch of matrices, such as heads. DTensor supports it only since 2.12."""
    ways = {(one.ndim, one.placements) for one in factors if isinstance(one, DTensor)}
    if len(factors) != 2 or not all(isinstance(one, DTensor) for one in factors) or len(ways) != 1:
        return False
    ndim, placements = ways.pop()
    return len(placements) == 1 and isinstance(placements[0], Shard) and placements[0].dim < ndim - 2


class _Beside(TorchFunctionMode):
    """Function mode that lets operations mix DTensors and plain tensors."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._mesh = mesh

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = _first((*args, *kwargs.values()))
        if first is None or func in _NOT_MIXED or getattr(func, "__name__", "") in ("__get__", "__set__"):
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(func, *args, **kwargs)
        if func is F.dropout:
            return self._on_parts(func, args[0].placements, args[0], *args[1:], **kwargs)
        if func in _PRODUCTS and _are_split_alike(*args[:2]):
            return self._on_parts(func, args[0].placements, *args, **kwargs)
        args, kwargs = tree_map_only(torch.Tensor, self._beside, (args, kwargs))
        outputs = func(*args, **kwargs)
        if func in _PARTS and first.placements == (Shard(first.ndim - 1),):
            return type(outputs)(self._last(part) for part in outputs)
        return outputs

    def _beside(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) or not tensor.ndim:
            return tensor
        return DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False)

    def _last(self, part: torch.Tensor) -> torch.Tensor:
        """Shard queries, keys or values again, so that each rank has only its heads."""
        if isinstance(part, DTensor) and part.placements == (Replicate(),) and not part.shape[-1] % self._mesh.size():
            return part.redistribute(placements=[Shard(part.ndim - 1)])
        return part

    def _attention(
        self, func: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Each rank computes its heads (dimension -3). If heads are not split, every rank computes all."""
        heads = Shard(query.ndim - 3)
        split = all(isinstance(one, DTensor) and one.placements == (heads,) for one in (query, key, value))
        at: Placement = heads if split else Replicate()
        query, key, value = (self._beside(one).redistribute(placements=[at]) for one in (query, key, value))  # type: ignore[attr-defined]
        if isinstance(attn_mask, torch.Tensor):
            per_head = split and attn_mask.ndim >= 3 and attn_mask.shape[-3] > 1
            mask = self._beside(attn_mask)
            where = Shard(attn_mask.ndim - 3) if per_head else Replicate()
            attn_mask = mask.redistribute(placements=[where]).to_local()  # type: ignore[attr-defined]
        return self._on_parts(func, (at,), query, key, value, attn_mask, *args, **kwargs)

    def _on_parts(self, func: Callable[..., Any], placements: Any, *args: Any, **kwargs: Any) -> Any:
        parts, options = tree_map_only(DTensor, lambda tensor: tensor.to_local(), (args, kwargs))
        return DTensor.from_local(func(*parts, **options), self._mesh, placements, run_check=False)
