"""``parameter.data = …`` on a sharded parameter.

A DTensor is a shell around the rank's shard. PyTorch puts the new values into the shell alone and loses them without
a word; FSDP2 goes on with the old shard. So the values are written into the shard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def _get(tensor: DTensor) -> Any:
    return tensor.detach()


def _set(tensor: DTensor, value: torch.Tensor) -> None:
    if tensor.shape != value.shape:
        raise RuntimeError(
            f"a sharded parameter of shape {list(tensor.shape)} cannot be given data of shape {list(value.shape)}"
        )
    mesh, placements = tensor.device_mesh, tensor.placements
    if not isinstance(value, DTensor):
        value = distribute_tensor(value.detach(), mesh, placements, src_data_rank=None)
    elif value.placements != placements or value.device_mesh != mesh:
        value = value.redistribute(mesh, placements)
    with torch.no_grad():
        tensor._local_tensor.copy_(value._local_tensor)


DATA = property(_get, _set)
"""To be given to ``DTensor`` for the time of user code."""
