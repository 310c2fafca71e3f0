"""Compiles each repeated block in place, before it is sharded; without such blocks, the model's forward.

Equal blocks are compiled once, and FSDP's collectives stay between compiled regions. See ``compile`` in
https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html.
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
    """Refuses nothing: code that cannot be compiled runs without compilation."""


def apply(model: nn.Module, context: ParallelContext) -> None:
    """Compile the repeated blocks; without any, the forwards of the model and of its FSDP units."""
    split = context.plan.degree("tp") > 1
    dynamic = False if split else None  # torch.compile fails on DTensors with dynamic shapes: compile for each shape
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
    """The model in the wrapper that ``torch.compile(model)`` returned. The cell may call either of them."""
    while type(module).__module__ == "torch._dynamo.eval_frame":  # not imported here: that takes seconds
        module = module._orig_mod  # type: ignore[assignment]
    return module


def revert(model: nn.Module) -> None:
    """Remove the compiled forwards. Blocks drop their compiled code by themselves when they are copied or pickled."""
    for module in model.modules():
        if vars(module).pop(_MARK, False):
            del vars(module)["forward"]


def _compile_forward(module: nn.Module, dynamic: bool | None) -> None:
    """Compile only the forward itself, inside the hooks that gather parameters or wait for gradients.

    With ``nn.Module.compile`` hooks break the graph, and the forward of a class that torch creates later is skipped.
    """
    if "forward" in vars(module):  # set on the object by other code
        module.compile(dynamic=dynamic)
        return
    compiled: Callable[..., Any] = torch.compile(type(module).forward, dynamic=dynamic)

    @wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A method, so that a copy of the module has its own."""
        return compiled(self, *args, **kwargs)

    vars(module).update({"forward": MethodType(forward, module), _MARK: True})
