"""Random numbers for sharded tensors (noise on weights, layers that are reset): drawn as on one device.

PyTorch lets each rank draw for its shard. With equal generators different rows get the same numbers. If shards differ
in size, ranks draw different amounts of numbers and would shuffle differently afterwards. Here every rank draws numbers
for the whole tensor and keeps its shard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from ...torch_private.dtensors import dispatcher
from ..core.patches import Patches

_ATEN = torch.ops.aten
_IN_PLACE = (_ATEN.normal_.default, _ATEN.uniform_.default)
_NEW = (_ATEN.randn_like.default, _ATEN.rand_like.default, _ATEN.randint_like.default, _ATEN.randint_like.low_dtype)


def install(patches: Patches) -> None:
    """Add the handlers while user code runs."""
    handlers = dispatcher()._custom_op_handlers
    patches.add(handlers, {**dict.fromkeys(_IN_PLACE, _fill), **dict.fromkeys(_NEW, _make)})


def _fill(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    target, *more = args
    drawn = operation(_like(target), *more, **kwargs)
    target._local_tensor.copy_(_shard(drawn, target)._local_tensor)
    found: DTensor = target
    return found


def _make(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    return _shard(operation(_like(args[0]), *args[1:], **kwargs), args[0])


def _like(tensor: DTensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor._local_tensor.device)


def _shard(drawn: Tensor, like: DTensor) -> DTensor:
    placements = [Replicate() if one.is_partial() else one for one in like.placements]
    return distribute_tensor(drawn, like.device_mesh, placements, src_data_rank=None)
