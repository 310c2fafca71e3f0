"""Gradient hooks of user code (``Tensor.register_hook``).

Within backward, a rank has the gradient of its own rows only, and the hooks of a sharded parameter are not called at
all (autograd knows the unsharded parameter). So hooks on parameters are called after backward, with the gradient of
the global batch, as on one device. Other hooks that would see partial gradients raise ``StrategyError``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ...protocol.errors import StrategyError
from ...usercode.frames import is_users

_ROWS = "only the gradients of this rank's samples"
_REMEDY = "-O model=whole computes the whole batch on every rank: gradients in it are then as on a single device"


class Before:
    """Sets aside existing gradients and hooks until the gradients of a backward are reduced.

    ``anew``: sets aside the gradients of all ``parameters``; else only of parameters with hooks.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, anew: bool) -> None:
        self._aside: list[tuple[nn.Parameter, Any, Tensor | None]] = []
        for parameter in parameters:  # a repeated parameter has nothing left to set aside
            hooks, grad = parameter._backward_hooks, parameter.grad
            if hooks or (anew and grad is not None):
                self._aside.append((parameter, hooks, grad))
                parameter.grad = None
            if hooks:
                parameter._backward_hooks = None

    @property
    def has_gradients(self) -> bool:
        return any(grad is not None for _, _, grad in self._aside)

    def follow(self, *, create_graph: bool = False) -> None:
        """Call the hooks with the reduced gradients, as autograd does, and add the gradients set aside."""
        with torch.set_grad_enabled(create_graph):
            for parameter, hooks, before in self._take():
                grad = parameter.grad
                if grad is None:
                    parameter.grad = before
                    continue
                for hook in list((hooks or {}).values()):
                    changed = hook(grad)
                    grad = grad if changed is None else changed
                if before is not None:
                    grad = before + grad if create_graph or before.is_sparse else before.add_(grad)
                parameter.grad = grad

    def undo(self) -> None:
        """The backward raised: restore the gradients set aside; they replace partial results of the backward."""
        for parameter, _, before in self._take():
            parameter.grad = parameter.grad if before is None else before

    def _take(self) -> list[tuple[nn.Parameter, Any, Tensor | None]]:
        """Everything set aside, with the hooks registered again."""
        aside, self._aside = self._aside, []
        for parameter, hooks, _ in aside:
            if hooks:
                parameter._backward_hooks = hooks
        return aside


def follow(replaced: Mapping[Any, Any]) -> None:
    """Give the hooks of replaced parameters to the new ones; the user's handle removes a hook from both."""
    for old, new in replaced.items():
        if old._backward_hooks:
            new._backward_hooks = old._backward_hooks


def check_parameters(model: nn.Module) -> None:
    """Raise ``StrategyError`` for hooks on parameters, for strategies where another library reduces gradients."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks:
            raise StrategyError(
                f"{name}.register_hook: DeepSpeed averages gradients, and a hook would see only this rank's gradient",
                "use --strategy ddp or fsdp, where hooks see the whole batch's gradient",
            )


def check_modules(model: nn.Module, *, tokens: bool = False) -> None:
    """Raise ``StrategyError`` for the user's backward hooks on modules, in a model whose forward is divided.

    ``tokens``: each rank has a part of every sequence.
    """
    theirs = _ROWS.replace("samples", "tokens") if tokens else _ROWS
    for name, module in model.named_modules():
        for hook in (*module._backward_hooks.values(), *module._backward_pre_hooks.values()):
            if is_users(_file_of(hook)):
                raise StrategyError(
                    f"a backward hook of {name or type(model).__name__} would see {theirs}, before the ranks "
                    "average them",
                    "use --strategy fsdp -O model=whole" if tokens else _REMEDY,
                )


def check_tensor(tensor: Tensor, caller: FrameType) -> None:
    """Raise ``StrategyError`` when user code registers a hook on an activation within a divided forward."""
    if is_users(caller.f_code.co_filename) and tensor.grad_fn is not None:
        raise StrategyError(
            f"a hook that is registered in the model's forward would see {_ROWS}, before the ranks average them",
            _REMEDY,
        )


def _file_of(hook: Any) -> str:
    while hasattr(hook, "func"):
        hook = hook.func
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    return code.co_filename if code is not None else __file__
