"""What torch is set to, and which release it is."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from ..protocol import releases


def release() -> tuple[int, int]:
    """The installed release of torch: (2, 11)."""
    return releases.release_of(torch.__version__)


def seed_for_gpus() -> Any:
    """The seed, as an object, that waits until this process begins to use a GPU; None where none waits."""
    return torch.cuda._lazy_seed_tracker.manual_seed_all_cb


def default_device() -> torch.device | None:
    """What ``set_default_device`` was given. ``get_default_device`` makes a tensor there, and begins to use a GPU."""
    device: torch.device | None = import_module("torch.utils._device").CURRENT_DEVICE
    return device


def print_options() -> Any:
    """What ``set_printoptions`` sets: precision, threshold, edgeitems, linewidth, sci_mode."""
    return import_module("torch._tensor_str").PRINT_OPTS
