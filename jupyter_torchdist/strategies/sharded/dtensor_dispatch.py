"""When the cell itself computes with shards: ``mixing`` and ``writable_views`` handle the dispatch instead of DTensor.

With ``tp`` forwards and backwards also compute with shards, but they need no handlers. Neither do the steps of
PyTorch's own optimizers: with handlers, steps that loop over parameters would take a third longer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...protocol.strategy import StrategyPlan
from ...torch_private.collectives import gathering
from ...torch_private.dtensors import dispatcher, fill_in_dtensor
from ...torch_private.places import AsyncCollectiveTensor
from ..core.dtensors import Handler, divided_as
from ..core.patches import Patches
from . import mixing, writable_views


class ByHand:
    """The handlers while user code runs, for a ``plan`` that shards models."""

    def __init__(self, plan: StrategyPlan) -> None:
        self._forwards_have_shards = plan.degree("tp") > 1
        self._without: dict[Any, Handler] = dispatcher()._custom_op_handlers
        fill_in_dtensor(self._without)
        self._asked = self._without
        self._known = set(self._without)

    def install(self, patches: Patches) -> None:
        """From here on the handlers are used."""
        self._asked = writable_views.following(self._without | mixing.handlers() | writable_views.handlers())
        patches.replace(dispatcher(), "_custom_op_handlers", lambda _: self._asked)
        patches.hook(register_optimizer_step_pre_hook(self._step_begins))
        patches.hook(register_optimizer_step_post_hook(self._step_ends))
        for name in ("backward", "grad"):
            patches.replace(torch.autograd, name, self.aside)
        patches.around(*gathering(), _waited)

    def aside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, run without the handlers if forwards compute with shards."""
        if not self._forwards_have_shards:
            return function

        @functools.wraps(function)
        def without(*args: Any, **kwargs: Any) -> Any:
            outside = dispatcher()._custom_op_handlers
            dispatcher()._custom_op_handlers = self._without
            try:
                return function(*args, **kwargs)
            finally:
                for operation in self._without.keys() - self._known:  # loss_parallel adds some with a model
                    self._known.add(operation)
                    self._asked[operation] = self._without[operation]
                dispatcher()._custom_op_handlers = outside

        return without

    def _step_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _divide_whole_gradients(optimizer)
        if _mixes_nothing(optimizer, *args[1:], **kwargs):
            dispatcher()._custom_op_handlers = self._without

    def _step_ends(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        dispatcher()._custom_op_handlers = self._asked


def _divide_whole_gradients(optimizer: Optimizer) -> None:
    """Those that the cell gives to sharded parameters, as ``torch.autograd.grad`` returns them on every rank."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, DTensor):
                gradient: Any = parameter.grad
                if gradient is not None and not isinstance(gradient, DTensor):
                    parameter.grad = divided_as(gradient, parameter)


def _waited(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """Wait for what DTensor gathers on the CPU. Several gathers at once corrupt memory under Gloo (PyTorch 2.13): with
    two threads that each start four and wait for them, it crashes within seconds.
    """
    gathered = original(*args, **kwargs)
    if isinstance(gathered, AsyncCollectiveTensor) and gathered.device.type == "cpu":
        gathered = gathered.wait()
    return gathered  # type: ignore[no-any-return]


def _mixes_nothing(optimizer: Optimizer, closure: Any = None, **_: Any) -> bool:
    """Whether a step runs only code of PyTorch's optimizer: no closure and no hooks of the cell."""
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return closure is None and not hooked and type(optimizer).__module__.startswith("torch.optim.")
