"""Settings of torch, and its release."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from ..protocol import releases


def release() -> tuple[int, int]:
    """The installed release of torch: (2, 11)."""
    return releases.release_of(torch.__version__)


def seed_for_gpus() -> Any:
    """The seed (an object) that torch will apply when this process begins to use a GPU; None if there is none."""
    return torch.cuda._lazy_seed_tracker.manual_seed_all_cb


def default_device() -> torch.device | None:
    """The argument of ``set_default_device``. (``get_default_device`` would create a tensor and initialise the GPU.)"""
    device: torch.device | None = import_module("torch.utils._device").CURRENT_DEVICE
    return device


def print_options() -> Any:
    """The settings of ``set_printoptions``: precision, threshold, edgeitems, linewidth, sci_mode."""
    return import_module("torch._tensor_str").PRINT_OPTS
