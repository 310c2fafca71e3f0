"""A forward that leaves no trace, for trials."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils import checkpoint

from ...torch_private.autograd import saved_tensors_hooks
from ..core.lent_iterators import LentIterators
from ..core.side_effects import Belongings
from ..sharded.unsharded import units_in


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
    """Undo a forward's changes to a model (attributes, buffers, parameters) and to the cell; discard its prints."""
    units = units_in([module])
    for unit in units:  # what is gathered is no place of its own: writes are kept in the shards
        unit.reshard()
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    belongings, silent = Belongings(module), io.StringIO()
    iterators = LentIterators(belongings.snapshots())
    try:
        with (
            contextlib.redirect_stdout(silent),
            contextlib.redirect_stderr(silent),
            _unseen_by_checkpoints(),
            belongings.weights,
        ):
            yield belongings
    finally:
        belongings.restore()
        iterators.end()
        if belongings.weights.undo():
            for unit in units:
                unit.reshard()
        with torch.no_grad():
            for buffer, value in buffers:
                if buffer.shape == value.shape:
                    buffer.copy_(value)
                else:  # the forward has given it its size (observers of quantisation)
                    buffer.data = value
