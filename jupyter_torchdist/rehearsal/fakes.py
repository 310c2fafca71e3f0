"""Substitutes for devices, other ranks and read values while a cell runs on fake tensors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..strategies.core.scatter import map_tensors, tensors_in
from ..strategies.step import equivalence
from ..strategies.step.ways import AddedParts, JoinedRows, SameEverywhere, Way
from ..torch_private.places import disable_current_modes


class Reached(BaseException):
    """The step is done. Not an ``Exception``, so that the cell does not catch it."""


class NotRehearsed(BaseException):
    """The cell does something that a rehearsal cannot answer or must not do. The message tells what."""


class _Join(torch.autograd.Function):
    """The output of the whole batch, from this rank's rows and the rows that other ranks would send."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.mine = part.size(0)
        received = part.new_empty((rows, *part.shape[1:]))
        return received.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].narrow(0, 0, ctx.mine).clone() * 1.0, None


def joined(part: torch.Tensor, total: int, mine: int) -> torch.Tensor:
    if not part.dim() or part.size(0) % mine:
        return part
    whole: torch.Tensor = _Join.apply(part, total * (part.size(0) // mine))  # type: ignore[no-untyped-call]
    return whole


def cut(tensor: torch.Tensor, total: int, mine: int) -> torch.Tensor:
    divided = tensor.dim() and tensor.size(0) == total and not isinstance(tensor, nn.Parameter)
    return tensor.narrow(0, 0, mine).clone() if divided else tensor


def place() -> str:
    """The current line of the user's code, as text."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__":
            return f", line {frame.f_lineno}"
        frame = frame.f_back
    return ""


def place_of(error: BaseException) -> str:
    """The line of the user's code that raised, as text."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == "__main__":
            line = trace.tb_lineno
        trace = trace.tb_next
    return f", line {line}" if line else ""


class OnCpu(TorchFunctionMode):
    """Replaces CUDA devices by the CPU, so that all tensors of the cell are fake CPU tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*(_on_cpu(value) for value in args), **kwargs)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value


def with_real_numbers(original: Callable[..., Any], *args: Any) -> Any:
    """Run functions that read values of their own tensors with real tensors (as the coordinate of a rank in a mesh)."""
    with disable_current_modes():
        return original(*args)


def stepped_always(
    _original: Callable[..., Any],
    _scaler: Any,
    optimizer: torch.optim.Optimizer,
    _state: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A gradient scaler always steps, because no gradient of a rehearsal is infinite."""
    return optimizer.step(*args, **kwargs)


def not_compiled(_original: Callable[..., Any], model: Any = None, **_options: Any) -> Any:
    """Skip compilation: compiled code does not keep more memory than eager code."""
    return model if model is not None else lambda function: function


def ways_by_shape(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> list[Way]:
    """How outputs of parts of a batch are combined, guessed from their shapes. A real job proves it."""
    few = functools.partial(equivalence.few, samples=rows)
    with torch.no_grad():
        outputs = tensors_in(forward(*map_tensors(args, few), **map_tensors(kwargs, few)))
    return [_way(one, min(rows, equivalence.FEW)) for one in outputs]


def _way(output: torch.Tensor, rows: int) -> Way:
    if output.dim():
        return SameEverywhere() if output.size(0) % rows else JoinedRows(0)
    return AddedParts(mean=True) if output.is_floating_point() else SameEverywhere()
