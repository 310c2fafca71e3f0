"""Sharded parameters of which a step uses only some, and not the same on every rank: experts, optional branches.

FSDP2 by itself sums the gradients that a rank *has*, in order: with equal shapes, one expert's with another's, and
nobody hears of it. Told to fill in zeros it is right, but a parameter that no rank used then gets zeros where one
device has None, and a weight decay shrinks it. So the ranks agree, at the end of each backward, on what was used.
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
    """Make gradients of a sharded ``model`` those of one device, whichever ranks use which parameter.

    Costs one all-reduce of a byte a parameter at the end of each backward, for which only ranks wait that have left a
    parameter out: elsewhere the next step begins meanwhile.
    """
    fill = None if fsdp_reduce_unused(model) else fsdp_fill_unused
    states = fsdp_states(model)
    use = Use([group for state in states for group in fsdp_groups(state)], context, fill)
    for group in use.groups:
        group.post_backward = partial(use.sum, group, group.post_backward)
    for state in states:
        fsdp_around_backward(state, use.begin, use.end)


class Use:
    """Which parameters this rank has used since gradients were last summed."""

    def __init__(self, groups: list[Any], context: ParallelContext, fill: Callable[[Any], None] | None) -> None:
        """``fill``: gives what a rank has left out of a group the zeros that are reduced for it."""
        self.groups, self.context, self._fill = groups, context, fill
        self.parameters = [p for group in groups for p in group.fsdp_params if p.sharded_param.requires_grad]
        self.used: set[Any] = set()
        self.had: list[bool] = []
        self.sent: Any = None

    def begin(self, is_first: bool, register: Callable[[], None]) -> None:
        """In place of what FSDP does when a unit is reached by a backward."""
        if is_first:
            self.had = [parameter.sharded_param.grad is not None for parameter in self.parameters]
        register()

    def sum(self, group: Any, original: Callable[..., None], *args: Any) -> None:
        """In place of what FSDP does when a unit's gradients are there: it sums them, or keeps them to be summed."""
        if group.reduce_grads:
            self.used.update(filter(fsdp_has_gradient, group.fsdp_params))
            if self._fill is not None:
                self._fill(group)
        original(*args)

    def end(self, finish: Callable[[], None]) -> None:
        """In place of what FSDP does at the end of a backward."""
        finish()
        if not all(group.reduce_grads for group in self.groups):
            return  # accumulates without sums; what was used counts for the one that sums
        mine = [parameter in self.used for parameter in self.parameters]
        self.used.clear()
        used = torch.tensor(mine, dtype=torch.uint8).to(self.context.device, non_blocking=True)
        if self.sent is not None:
            self.sent.wait()  # long over; what has gone wrong with it is raised here
        self.sent = dist.all_reduce(used, dist.ReduceOp.MAX, self.context.data_group, async_op=True)
        if all(mine):
            return
        self.sent.wait()
        for parameter, somewhere, had in zip(self.parameters, used.tolist(), self.had, strict=True):
            if not somewhere and not had:
                parameter.sharded_param.grad = None
