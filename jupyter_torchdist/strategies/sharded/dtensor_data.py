"""``parameter.data = …`` on a sharded parameter.

A DTensor is a wrapper around the rank's shard. PyTorch changes only the wrapper and loses the new values silently:
FSDP2 continues with the old shard. So the values are written into the shard. Tensors that the cell has kept from
``parameter.data`` get a copy of the old values, so a cell can swap weights for an evaluation and swap them back.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.dtensors import divided_as, whole

_given = WeakTensorKeyDictionary()
"""Weak references to the tensors that the cell was given as ``data`` of a tensor."""


def _get(tensor: DTensor) -> Any:
    alias = tensor.detach()
    known = [one for one in _given.get(tensor, ()) if one() is not None]
    _given[tensor] = [*known, weakref.ref(alias)]
    return alias


def _let_go(tensor: DTensor) -> None:
    """Let tensors that were given as ``tensor.data`` keep the current values in their own memory."""
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
    increment_version(tensor)  # what is gathered of it now is old


DATA = property(_get, _set)
"""The property ``data`` of ``DTensor`` while user code runs."""


def _set_plain(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    """PyTorch would take the wrapper's memory, which does not exist, and crash."""
    _PLAIN.__set__(parameter, whole(value))


_PLAIN: Any = torch.Tensor.data
PLAIN_DATA = property(_PLAIN.__get__, _set_plain)
"""The property of parameters that are not sharded, such as a moving average of weights: they take full values."""
