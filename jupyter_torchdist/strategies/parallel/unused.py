"""Sharded models in which ranks use different parameters in a step: experts, optional branches.

FSDP2 reduces the gradients that a rank *has*, in order. With equal shapes it adds up gradients of different experts,
without an error. With zeros for missing gradients the sums are right, but a parameter that no rank used gets zeros
instead of None, and weight decay shrinks it. So at the end of each backward the ranks agree on what was used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...torch_private.fully_shard import (
    fsdp_around_backward,
    fsdp_fill_unused,
    fsdp_groups,
    fsdp_has_gradient,
    fsdp_reduce_unused,
    fsdp_states,
)
from ..core.context import ParallelContext


def agree_on_use(model: nn.Module, context: ParallelContext) -> None:
    """Make the gradients of a sharded ``model`` the single-device ones, whichever ranks use which parameter.

    It costs one all-reduce of a byte for each parameter at the end of each backward. Only ranks that have not used
    some parameter wait for it; the other ranks begin the next step.
    """
    fill = None if fsdp_reduce_unused(model) else fsdp_fill_unused
    states = fsdp_states(model)
    use = Use([group for state in states for group in fsdp_groups(state)], context, fill)
    for group in use.groups:
        group.post_backward = partial(use.sum, group, group.post_backward)
    for state in states:
        use.reached = fsdp_around_backward(state, use.begin, use.end)


class Use:
    """Which parameters this rank has used since the last reduction of gradients."""

    def __init__(self, groups: list[Any], context: ParallelContext, fill: Callable[[Any], None] | None) -> None:
        """``fill``: gives zero gradients to the parameters of a group that a rank has not used."""
        self.groups, self.context, self._fill = groups, context, fill
        self.parameters = [p for group in groups for p in group.fsdp_params if p.sharded_param.requires_grad]
        self.used: set[Any] = set()
        self.had: list[bool] = []
        self.sent: Any = None
        self.reached: Callable[[], None]

    def begin(self, is_first: bool, register: Callable[[], None]) -> None:
        """In place of FSDP's function for the time when a backward reaches a unit."""
        if is_first:
            self.had = [parameter.sharded_param.grad is not None for parameter in self.parameters]
        register()

    def sum(self, group: Any, original: Callable[..., None], *args: Any) -> None:
        """In place of FSDP's function that reduces a unit's gradients, or keeps them for a later reduction."""
        self.reached()
        if group.reduce_grads:
            self.used.update(filter(fsdp_has_gradient, group.fsdp_params))
            if self._fill is not None:
                self._fill(group)
        original(*args)

    def end(self, finish: Callable[[], None]) -> None:
        """In place of FSDP's function at the end of a backward."""
        finish()
        if not all(group.reduce_grads for group in self.groups):
            return  # accumulates without a reduction; what was used counts for the next one
        mine = [parameter in self.used for parameter in self.parameters]
        self.used.clear()
        used = torch.tensor(mine, dtype=torch.uint8).to(self.context.device, non_blocking=True)
        if self.sent is not None:
            self.sent.wait()  # over by now; raises its errors
        self.sent = dist.all_reduce(used, dist.ReduceOp.MAX, self.context.data_group, async_op=True)
        if all(mine):
            return
        self.sent.wait()
        for parameter, somewhere, had in zip(self.parameters, used.tolist(), self.had, strict=True):
            if not somewhere and not had:
                parameter.sharded_param.grad = None
