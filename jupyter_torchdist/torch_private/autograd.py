"""Autograd, and functions that are in the way of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_current_graph_task = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether this thread computes gradients now."""
    return _current_graph_task() != -1


def in_functorch() -> bool:
    """Whether ``vmap`` or ``grad`` of ``torch.func`` is under way."""
    return torch._C._functorch.maybe_current_level() is not None


def at_end_of_backward(call: Callable[[], None]) -> None:
    """``call`` when the backward that is under way has ended. Raises ``RuntimeError`` outside of one."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def saved_tensors_hooks() -> Any:
    """The (pack, unpack) in force for tensors that are saved for a backward, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def number_of_function_modes() -> int:
    """How many ``TorchFunctionMode`` are in force."""
    return torch._C._len_torch_function_stack()
