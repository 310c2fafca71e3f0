"""Reads the divisor of a mean from its graph at every step: fewer targets than samples may count."""

from __future__ import annotations

import re
from typing import Any

import torch

_LOSSES = ("NllLossBackward", "NllLoss2DBackward")
_DEPTH = 50


class Parted(torch.autograd.Function):
    """A loss combined from parts of a batch: keeps the divisor and form that an undivided graph would show."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, divisor: torch.Tensor | None, form: tuple[str, ...]) -> torch.Tensor:
        ctx.divisor, ctx.form = divisor, form
        return value.clone()  # no view: the cell may write to it (``loss /= steps``)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None

    @classmethod
    def of(cls, value: torch.Tensor, divisor: torch.Tensor | None, form: tuple[str, ...]) -> torch.Tensor:
        whole: torch.Tensor = cls.apply(value, divisor, form)  # type: ignore[no-untyped-call]
        return whole


_PARTED: Any = Parted._backward_cls


def divisor_of(loss: torch.Tensor) -> torch.Tensor | None:
    """The total weight of the targets in the cross entropy behind ``loss``; None if there is none.

    Only operations that scale the loss may follow it. Returns a 0-dim tensor on the device of the loss.
    """
    node: Any = loss.grad_fn
    for _ in range(_DEPTH):
        if node is None:
            return None
        if isinstance(node, _PARTED):
            divisor: torch.Tensor | None = node.divisor
            return divisor
        name = node.name()
        if name.startswith(_LOSSES):
            weight: torch.Tensor = node._saved_total_weight
            return weight.detach()
        before = [function for function, _ in node.next_functions if function is not None]
        if len(before) != 1 or not name.startswith(_SCALES):
            return None
        node = before[0]
    return None


def form_of(loss: torch.Tensor) -> tuple[str, ...]:
    """How a loss was reduced: the last reductions in its graph, in order, each with its ``reduction`` argument."""
    node: Any = loss.grad_fn
    form: list[str] = []
    for _ in range(_DEPTH):
        if node is None or len(form) == _REDUCTIONS_LOOKED_AT:
            break
        if isinstance(node, _PARTED):
            return (*form, *node.form)[:_REDUCTIONS_LOOKED_AT]
        name = node.name()
        if _REDUCES.search(name):
            form.append(f"{_ALSO.get(name, name)} {getattr(node, '_saved_reduction', '')}")
        before = [function for function, _ in node.next_functions if function is not None]
        if len(before) != 1:
            break
        node = before[0]
    return tuple(form)


_REDUCES = re.compile("Loss|Sum|MeanBackward[01]|CrossEntropy|KlDiv|Norm|Dot")
_REDUCTIONS_LOOKED_AT = 2
_ALSO = {"CtcLossBackward1": "CtcLossBackward0"}
"""The same loss has another node if its lengths are tensors; without a dispatch mode they become lists."""
_SCALES = (
    *("MulBackward", "DivBackward", "NegBackward", "ToCopyBackward", "ViewBackward", "ReshapeAliasBackward"),
    *("UnsafeViewBackward", "SqueezeBackward", "UnsqueezeBackward", "CloneBackward", "AliasBackward"),
)
