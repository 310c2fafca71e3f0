"""Activation checkpointing, loss scales, composable wrappers."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn


def checkpointing() -> tuple[Any, str]:
    """(module, name) of the function that implements the non-reentrant ``torch.utils.checkpoint``."""
    module = import_module("torch.utils.checkpoint")
    name = "_checkpoint_without_reentrant_generator"
    return module, f"{name}_impl" if hasattr(module, f"{name}_impl") else name  # since 2.15


UNSCALING = torch.amp.GradScaler, "_unscale_grads_"
SCALED_STEP = torch.amp.GradScaler, "_maybe_opt_step"
"""(class, name) of the methods with which a gradient scaler unscales gradients, and runs the optimizer's step."""


def forget_composable_state(module: nn.Module) -> None:
    """Make torch forget that ``module`` was replicated, sharded or checkpointed in place."""
    from torch.distributed import _composable_state

    _composable_state._module_state_mapping.pop(module, None)
