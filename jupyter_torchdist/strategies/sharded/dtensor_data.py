"""``parameter.data = …`` on a sharded parameter.

A DTensor is a shell around the rank's shard. PyTorch puts the new values into the shell alone and loses them without
a word; FSDP2 goes on with the old shard. So the values are written into the shard, and what the cell has kept of
``parameter.data`` is given the old values in memory of its own: who swaps weights for an evaluation swaps them back.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.dtensors import divided_as

_given = WeakTensorKeyDictionary()
"""What the cell was given as ``data`` of a tensor, weakly."""


def _get(tensor: DTensor) -> Any:
    alias = tensor.detach()
    known = [one for one in _given.get(tensor, ()) if one() is not None]
    _given[tensor] = [*known, weakref.ref(alias)]
    return alias


def _let_go(tensor: DTensor) -> None:
    """What was given as ``tensor.data`` keeps its values, whatever becomes of the tensor's."""
    aliases = [alias for one in _given.pop(tensor, ()) if (alias := one()) is not None]
    if aliases:
        kept = tensor._local_tensor.detach().clone()
        for alias in aliases:
            alias._local_tensor.data = kept


def _set(tensor: DTensor, value: torch.Tensor) -> None:
    if tensor.shape != value.shape:
        raise RuntimeError(
            f"a sharded parameter of shape {list(tensor.shape)} cannot be given data of shape {list(value.shape)}"
        )
    mesh, placements = tensor.device_mesh, tensor.placements
    if not isinstance(value, DTensor):
        value = divided_as(value, tensor)
    elif value.placements != placements or value.device_mesh != mesh:
        value = value.redistribute(mesh, placements)
    _let_go(tensor)
    with torch.no_grad():
        tensor._local_tensor.copy_(value._local_tensor)


DATA = property(_get, _set)
"""To be given to ``DTensor`` for the time of user code."""
