"""Calls of the cell that go to DeepSpeed's engine: methods of its optimizer, its losses, its arguments."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..core.outputs import changed
from ..core.scatter import map_tensors

REFUSED: tuple[tuple[Any, str], ...] = (
    (torch.optim.Optimizer, "load_state_dict"),
    (torch.amp.GradScaler, "scale"),
    (torch.nn.utils, "clip_grad_value_"),
    (torch.nn.utils, "get_total_norm"),
    (torch.nn.utils, "clip_grads_with_norm_"),
    (torch.autograd, "grad"),
    (torch.func, "functional_call"),
)
"""Functions that do not work with an engine: they read or change gradients and states that are in its buffers."""


def imported(device: torch.device) -> Any:
    """Import DeepSpeed for this device, with a log level of warnings."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    deepspeed = importlib.import_module("deepspeed")
    deepspeed.utils.logger.setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", r"`torch\.distributed\..* is deprecated", FutureWarning)
    if device.type == "cpu":  # else it compiles an operator for a minute; Gloo does the same
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class EngineBehind(Protocol):
    """The engine as the calls of the cell use it."""

    within: bool
    """Whether the engine itself is running."""

    @property
    def made(self) -> bool: ...

    @property
    def keeps_gradients(self) -> bool: ...

    def step(self, closure: Any) -> Any: ...

    def zero_grad(self) -> None: ...


def take_over(engine: EngineBehind, optimizer: torch.optim.Optimizer) -> None:
    """The cell's ``step`` and ``zero_grad`` call the engine; for the engine itself they are unchanged.

    They are bound methods, as torch's schedulers expect, which also wrap ``step``, before or after this.
    """
    plain_step, plain_zero = optimizer.step, optimizer.zero_grad

    def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if engine.within or not engine.made:
            return plain_step() if closure is None else plain_step(closure)
        return engine.step(closure)

    def zero_grad(_: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        if engine.within or not engine.made or not engine.keeps_gradients:
            plain_zero(set_to_none)
        if engine.made and not engine.within:
            engine.zero_grad()

    if hasattr(plain_step, "_wrapped_by_lr_sched"):
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    vars(optimizer)["step"] = MethodType(step, optimizer)
    vars(optimizer)["zero_grad"] = MethodType(zero_grad, optimizer)


def in_halves(root: nn.Module, dtype: torch.dtype) -> None:
    """Cast the model's inputs to the dtype of its weights, and its outputs to fp32, as a loss expects them."""

    def inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return map_tensors((args, kwargs), lambda one: one.to(dtype) if one.dtype == torch.float32 else one)

    def outputs(_: nn.Module, __: Any, found: Any) -> Any:
        return changed(found, lambda one: one.float() if one.dtype == dtype else one)

    root.register_forward_pre_hook(inputs, prepend=True, with_kwargs=True)
    root.register_forward_hook(outputs)


def total_of(tensors: Any, grads: Any) -> Tensor:
    """One scalar whose backward is the backward of all ``tensors``, each weighted by its gradient."""
    losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    given = [grads] * len(losses) if grads is None or isinstance(grads, Tensor) else list(grads)
    parts = [loss if grad is None else (loss * grad).sum() for loss, grad in zip(losses, given, strict=True)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def clipping(
    max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> tuple[float, float, bool]:
    """The arguments of ``clip_grad_norm_`` that matter here."""
    return float(max_norm), float(norm_type), error_if_nonfinite
