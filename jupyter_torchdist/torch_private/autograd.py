"""The state of autograd, of functorch, and of function modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_current_graph_task = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether this thread is running a backward pass."""
    return _current_graph_task() != -1


def in_functorch() -> bool:
    """Whether ``vmap`` or ``grad`` of ``torch.func`` is active."""
    return torch._C._functorch.maybe_current_level() is not None


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Run ``call`` at the end of the current backward pass. Raises ``RuntimeError`` outside a backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def saved_tensors_hooks() -> Any:
    """The active (pack, unpack) hooks for tensors saved for backward, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def number_of_function_modes() -> int:
    """How many ``TorchFunctionMode`` are active."""
    return torch._C._len_torch_function_stack()
