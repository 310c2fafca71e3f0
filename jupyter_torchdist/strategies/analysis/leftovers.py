"""Side effects of a forward: tensors kept, buffers changed."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from torch import nn

from ...torch_private.places import NormBase
from .batchwise import BatchwiseTracker
from .lattice import Same


def kept_beside(tracker: BatchwiseTracker, known: Sequence[torch.Tensor]) -> str | None:
    """A description of a tensor of this rank's rows that outlives the forward; None if there is none."""
    gc.collect(0)
    ours = {id(tensor) for tensor in known}
    for tensor in tracker.of_the_batch():
        if id(tensor) not in ours:
            return f"a tensor of shape {list(tensor.shape)}"
    return None


def changed_buffer(module: nn.Module, before: dict[str, torch.Tensor], tracker: BatchwiseTracker) -> str | None:
    """A buffer that values of the batch were written to; normalisation layers are synchronised elsewhere."""
    normalising = {
        f"{name}.{own}" if name else own
        for name, part in module.named_modules()
        if isinstance(part, NormBase)
        for own, _ in part.named_buffers(recurse=False)
    }
    for name, buffer in module.named_buffers():
        known = name in before and name not in normalising
        if known and not torch.equal(buffer, before[name]) and not isinstance(tracker.kind(buffer), Same):
            return name
    return None
