"""Compilation of each repeated block, in place, before it is sharded; of the model's forward where there is none.

A block is compiled once for all its siblings, and the collectives of FSDP stay between compiled regions. See
https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html (``compile``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..core.context import ParallelContext
from . import activations, fsdp

_MARK = "_torchdist_compiled"


def check(model: nn.Module, context: ParallelContext) -> None:
    """Whatever cannot be compiled runs as it is: nothing to refuse."""


def apply(model: nn.Module, context: ParallelContext) -> None:
    """Compile the repeated blocks, or the model and what is sharded by itself in it."""
    split = context.plan.degree("tp") > 1
    dynamic = False if split else None  # torch.compile cannot follow DTensors whose shapes change: once for each shape
    blocks = activations.of(model, context)
    for block in blocks:
        block.compile(dynamic=dynamic)
    if not blocks:
        units = fsdp.units(model, context.plan) if context.plan.degree("dp_shard") > 1 else []
        for module in (model, *(module for group in units for module in group)):
            _compile_forward(module, dynamic)
    if split:
        context.say("--compile: with tp, only the code between the split layers is compiled, not the layers")
    if context.plan.degree("cp") > 1:
        context.say(
            "--compile: with cp, a block is compiled in parts, because the ranks exchange data around its attention"
        )


def unwrapped(module: nn.Module) -> nn.Module:
    """The model within what ``torch.compile(model)`` gave the cell, which may call either."""
    while type(module).__module__ == "torch._dynamo.eval_frame":  # not imported here: that takes seconds
        module = module._orig_mod  # type: ignore[assignment]
    return module


def revert(model: nn.Module) -> None:
    """Forwards are plain ones again; blocks forget by themselves what was compiled when they are copied or pickled."""
    for module in model.modules():
        if vars(module).pop(_MARK, False):
            del vars(module)["forward"]


def _compile_forward(module: nn.Module, dynamic: bool | None) -> None:
    """Within the hooks that gather parameters or wait for gradients, where ``nn.Module.compile`` would be around them.

    torch.compile ends a graph at such a hook, and passes over the forward of a class that torch has made since.
    """
    if "forward" in vars(module):  # on the object: another's
        module.compile(dynamic=dynamic)
        return
    compiled: Callable[..., Any] = torch.compile(type(module).forward, dynamic=dynamic)

    @wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A method, so that a copy of the module has its own."""
        return compiled(self, *args, **kwargs)

    vars(module).update({"forward": MethodType(forward, module), _MARK: True})
