"""Side effects of a forward: tensors kept, buffers changed, attributes set."""

from __future__ import annotations

import contextlib
import gc
import io
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.utils import checkpoint

from ...torch_private.autograd import saved_tensors_hooks
from ...torch_private.places import NormBase
from ..core.side_effects import Belongings
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


def _unseen_by_checkpoints() -> contextlib.AbstractContextManager[None]:
    """Hide saved tensors from an enclosing ``torch.utils.checkpoint``, which counts them."""
    if not within_checkpoint():
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, _as_it_is)


def within_checkpoint() -> bool:
    """Whether a non-reentrant checkpoint is active, which recomputes activations instead of saving them."""
    hooks = saved_tensors_hooks()
    return hooks is not None and hooks[0].__module__ == checkpoint.__name__


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextlib.contextmanager
def no_trace(module: nn.Module) -> Iterator[Belongings]:
    """Undo a forward's changes to attributes and buffers of modules and to objects of the cell; discard its prints."""
    parts = list(module.modules())
    attributes = [dict(part.__dict__) for part in parts]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    tables = [dict(part._buffers) for part in parts]
    belongings, silent = Belongings(module), io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(silent),
            contextlib.redirect_stderr(silent),
            _unseen_by_checkpoints(),
        ):
            yield belongings
    finally:
        belongings.restore()
        for part, saved, table in zip(parts, attributes, tables, strict=True):
            part.__dict__.clear()
            part.__dict__.update(saved)
            part._buffers.clear()
            part._buffers.update(table)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
