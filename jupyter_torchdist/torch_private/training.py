"""Activation checkpointing, loss scales, composable wrappers."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.utils.data.dataloader
from torch import nn


def checkpointing() -> tuple[Any, str]:
    """(module, name) of the function that implements the non-reentrant ``torch.utils.checkpoint``."""
    module = import_module("torch.utils.checkpoint")
    name = "_checkpoint_without_reentrant_generator"
    return module, f"{name}_impl" if hasattr(module, f"{name}_impl") else name  # since 2.15


UNSCALING = torch.amp.GradScaler, "_unscale_grads_"
SCALED_STEP = torch.amp.GradScaler, "_maybe_opt_step"
"""(class, name) of the methods with which a gradient scaler unscales gradients, and runs the optimizer's step."""


LOADING: Any = getattr(torch.utils.data.dataloader, "_BaseDataLoaderIter", None)
"""The class of a ``DataLoader``'s iterators; None in a release without it."""


def index_sampler(iterator: Any) -> Any:
    """What gives the indices of each batch to an iterator of ``LOADING``; None in a release that hides it."""
    return getattr(iterator, "_index_sampler", None)


def forget_composable_state(module: nn.Module) -> None:
    """Make torch forget that ``module`` was replicated, sharded or checkpointed in place."""
    from torch.distributed import _composable_state

    _composable_state._module_state_mapping.pop(module, None)
