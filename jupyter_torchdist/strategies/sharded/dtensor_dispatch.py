"""What the cell computes with shards by hand: ``mixing`` and ``pieces`` are asked in DTensor's place, and when.

Under ``tp`` forwards and backwards compute with shards, too, and know how. Neither they nor the steps of PyTorch's own
optimizers, which mix nothing, ask anybody: steps that go parameter by parameter would take a third longer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...protocol.strategy import StrategyPlan
from ...torch_private.collectives import gathering
from ...torch_private.dtensors import dispatcher, fill_in_dtensor
from ...torch_private.places import AsyncCollectiveTensor
from ..core.dtensors import Handler
from ..core.patches import Patches
from . import mixing, writable_views


class ByHand:
    """For the time of user code that ``plan`` shards models for."""

    def __init__(self, plan: StrategyPlan) -> None:
        self._forwards_have_shards = plan.degree("tp") > 1
        self._without: dict[Any, Handler] = dispatcher()._custom_op_handlers
        fill_in_dtensor(self._without)
        self._asked = self._without
        self._known = set(self._without)

    def install(self, patches: Patches) -> None:
        """From here on they are asked."""
        self._asked = writable_views.following(self._without | mixing.handlers() | writable_views.handlers())
        patches.replace(dispatcher(), "_custom_op_handlers", lambda _: self._asked)
        patches.hook(register_optimizer_step_pre_hook(self._step_begins))
        patches.hook(register_optimizer_step_post_hook(self._step_ends))
        for name in ("backward", "grad"):
            patches.replace(torch.autograd, name, self.aside)
        patches.around(*gathering(), _waited)

    def aside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, within which nobody is asked where forwards have shards."""
        if not self._forwards_have_shards:
            return function

        @functools.wraps(function)
        def without(*args: Any, **kwargs: Any) -> Any:
            outside = dispatcher()._custom_op_handlers
            dispatcher()._custom_op_handlers = self._without
            try:
                return function(*args, **kwargs)
            finally:
                for operation in self._without.keys() - self._known:  # loss_parallel's come with a model
                    self._known.add(operation)
                    self._asked[operation] = self._without[operation]
                dispatcher()._custom_op_handlers = outside

        return without

    def _step_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _mixes_nothing(optimizer, *args[1:], **kwargs):
            dispatcher()._custom_op_handlers = self._without

    def _step_ends(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        dispatcher()._custom_op_handlers = self._asked


def _waited(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """What DTensor gathers, once it is there. Several on their way corrupt memory under Gloo (PyTorch 2.13): two of
    its threads crash within seconds, where each begins four and waits for them.
    """
    gathered = original(*args, **kwargs)
    if isinstance(gathered, AsyncCollectiveTensor) and gathered.device.type == "cpu":
        gathered = gathered.wait()
    return gathered  # type: ignore[no-any-return]


def _mixes_nothing(optimizer: Optimizer, closure: Any = None, **_: Any) -> bool:
    """Whether what a step computes with is the optimizer's own; a closure and hooks are the cell's."""
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return closure is None and not hooked and type(optimizer).__module__.startswith("torch.optim.")
