"""Explains errors for a submodule that is called directly, by a method other than the model's ``forward``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection
from types import FrameType

import torch
from torch import nn

from ...protocol.errors import StrategyError
from ...usercode.frames import is_users
from ..core.holders import all_of

_CONTAINERS = (nn.ModuleDict, nn.ModuleList)


def explain(
    error: StrategyError, part: nn.Module, strategy: str, pending: Collection[torch.Tensor]
) -> StrategyError | None:
    """``error`` (``part`` cannot be divided), with the call that caused it; None if ``part`` is no submodule.

    ``pending``: parameters of optimizers that are not distributed yet.
    """
    owner, method = _method(part, pending) or (_whole(part, pending), "")
    if owner is None:
        return None
    name = type(owner).__name__
    called = {
        "": f"a part of {name} is called by itself",
        "forward": f"{name}.forward is called, and not the model",
    }.get(method, f"{name}.{method} is called, which is not its forward")
    moved = "" if method == "forward" else f", and move what {method or 'the loop'} does with its layers into forward"
    return StrategyError(
        f"{called}: {strategy} would divide only {type(part).__name__}, the first layer that is called "
        f"({error.message})",
        f"train through the forward of {name}: call the model itself (model(x)){moved}; or use --strategy ddp",
    )


def _method(part: nn.Module, pending: Collection[torch.Tensor]) -> tuple[nn.Module, str] | None:
    """The innermost running user method of a module that contains ``part`` and trains more parameters.

    Such a module itself was not called: otherwise it would have been distributed.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and is_users(code.co_filename):
            holder = frame.f_locals.get(code.co_varnames[0])
            if isinstance(holder, nn.Module) and hasattr(holder, code.co_name) and _trains_more(holder, part, pending):
                return holder, code.co_name
        frame = frame.f_back
    return None


def _whole(part: nn.Module, pending: Collection[torch.Tensor]) -> nn.Module | None:
    """The largest model that contains ``part``."""
    found = [one for one in all_of(nn.Module) if _trains_more(one, part, pending)]
    return max(found, key=lambda one: sum(1 for _ in one.modules()), default=None)


def _trains_more(holder: nn.Module, part: nn.Module, pending: Collection[torch.Tensor]) -> bool:
    forward = inspect.getattr_static(type(holder), "forward")  # for torch.jit scripts, getattr would raise
    if holder is part or isinstance(holder, _CONTAINERS) or forward is nn.Module.forward:
        return False
    if not any(module is part for module in holder.modules()):
        return False
    own = set(part.parameters())
    return any(parameter in pending and parameter not in own for parameter in holder.parameters())
