"""Tensors that share the memory of others: in-place changes of them, and how to keep these apart."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from ...protocol.errors import StrategyError
from ..core.scatter import tensors_in


def no_view(tensor: Tensor) -> Tensor:
    """The same memory and gradient, but neither a view nor a leaf: it can be changed in place, and keeps its hooks."""
    result: Tensor = _NoView.apply(tensor)  # type: ignore[no-untyped-call]
    return result


def no_view_with_gradient(tensor: Tensor) -> Tensor:
    """``no_view`` of a tensor that asks for a gradient; another one as it is."""
    return no_view(tensor) if tensor.requires_grad else tensor


class _NoView(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def for_a_trial(tensor: Tensor) -> Tensor:
    """A copy, if a forward may change ``tensor`` in place: torch forbids that for what asks for a gradient."""
    return tensor if tensor.requires_grad else tensor.clone()


def versions(tensors: list[Tensor]) -> list[int]:
    """They grow when a tensor, or a view of it, is changed in place."""
    return [0 if one.is_inference() else one._version for one in tensors]


class Unwritten:
    """A forward in this context that changes its ``inputs`` raises ``StrategyError``: a rank would change its part."""

    def __init__(self, inputs: Any) -> None:
        self._inputs = tensors_in(inputs)
        self._before = versions(self._inputs)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and versions(self._inputs) != self._before:
            raise StrategyError(
                "the model's forward writes into one of its inputs, of which each rank computes a part",
                "write into a copy: x = x * 2 instead of x *= 2",
            )
