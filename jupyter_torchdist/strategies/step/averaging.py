"""Averages gradients over the ranks after each backward, for the automatic way: as DDP's reducer, with its options.

DDP knows from its own forward which gradients will come. Here any backward is possible (several per step, a
gradient penalty, other branches on each rank). So each rank tells which gradients it had: the last bucket ends with a
number for each parameter. A gradient that is None on some ranks counts as zeros there. A gradient that is None on all
ranks remains None. Gradients that are equal on all ranks do not change, so accumulated gradients may be averaged again.

If no gradients exist before a backward, autograd accumulates them directly in the buckets, without a copy.
If the losses were divided before the backward, gradients are summed and not divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...protocol.errors import StrategyError
from ...protocol.options.strategy import chosen
from ...protocol.strategy import DIMENSIONS, StrategyPlan
from ..core.ownership import OURS
from .compression import Compression
from .early import Early
from .gradients import SPARSE, UNUSED, average_sparse, used_somewhere
from .layout import CARGO, Bucket, BucketLayout


@dataclass(frozen=True)
class How:
    """DDP's options. ``static``: every backward gives the same set of gradients.

    ``views``: gradients from before the backward become views of the buckets, too; new ones always are.
    ``early``: gradients are final when they come; no other parallelism processes them.
    """

    bucket_bytes: int = 25 * 2**20
    views: bool = False
    static: bool = False
    hook: str = "none"
    early: bool = True

    @staticmethod
    def of(plan: StrategyPlan) -> How:
        megabytes = chosen(plan, "bucket_cap_mb")
        return How(
            max(1, int(megabytes * 2**20)),
            chosen(plan, "gradient_as_bucket_view"),
            chosen(plan, "static_graph"),
            chosen(plan, "comm_hook"),
            all(plan.degree(dimension) == 1 for dimension in DIMENSIONS if dimension != "dp_replicate"),
        )


_FROM_A_STRATEGY = (OURS, "torch.distributed")


def check(model: nn.Module) -> None:
    """Raise ``StrategyError`` for hooks that use gradients within the backward, as an optimizer step in a hook."""
    for name, parameter in model.named_parameters():
        hooks: dict[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for hook in hooks.values():
            if not str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith(_FROM_A_STRATEGY):
                raise StrategyError(
                    f"{name}.register_post_accumulate_grad_hook: a hook would see this rank's gradient, which is "
                    "averaged over the ranks after the backward",
                    "do after backward() what the hook does",
                )


class Averaging:
    """Averages the gradients of the given parameters over the ranks of ``group``.

    The state (which gradients have ever come, which are sparse) and the order in the buckets are equal on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, how: How) -> None:
        self._group, self._how = group, how
        self._compression = Compression(how.hook, group)
        self._given: list[nn.Parameter] = []
        self._wanted: list[bool] = []
        self._trained: list[nn.Parameter] = []
        self._seen: set[nn.Parameter] = set()  # dense gradients have come to them, on some rank
        self._sparse: set[nn.Parameter] = set()
        self._others: list[nn.Parameter] = []
        self._layout: BucketLayout | None = None
        self._begun = self._summed = self._kept = False
        self._cargo: list[float] = []
        self.carried: list[float] = []
        """The sums over the ranks of the numbers given to ``carry``."""
        self._first: list[bool] | None = None  # under ``static``: which gradients this rank had at first
        self._early = Early(self.send)

    # -------------------------------------------------------------------------------------------------- a backward

    def begins_anew(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether to call ``begin``, with existing gradients set aside: new ones then go directly into the buckets.

        The same on all ranks.
        """
        return (
            self._layout is not None
            and self._layout.has_places
            and self._how.early
            and not self._how.views
            and not self._sparse
            and self._are_known(parameters)
        )

    def begin(self, *, silent: bool, may_sum: bool = False, kept: bool = False) -> bool:
        """Start a backward without existing gradients. Returns whether gradients will be summed, not averaged.

        ``silent``: the backward does not communicate. ``may_sum``: its losses can be divided by the number of ranks
        before (equal on all ranks). ``kept``: existing gradients were set aside until its end.
        """
        layout = self._layout
        assert layout is not None
        for bucket in layout.buckets:
            bucket.open()
        self._begun, self._kept, self._cargo = True, kept, []
        self._early.begin(layout, regular=silent and self._compression.early)
        self._summed = may_sum and self._compression.sums
        return self._summed

    def carries(self, dtype: torch.dtype) -> bool:
        """Whether numbers of this type can be sent with the gradients of the current backward."""
        if not self._summed or self._layout is None or not self._layout.counted:
            return False
        last = self._layout.buckets[-1]
        return last.device.type == "cpu" and torch.promote_types(dtype, last.dtype) == last.dtype

    def carry(self, numbers: Sequence[float]) -> None:
        """Sum up to ``CARGO`` numbers over the ranks, together with the gradients; the result is in ``carried``."""
        self._cargo = list(numbers)

    def fail(self) -> None:
        """The backward raised: send the buckets that other ranks may have sent, and discard the results."""
        layout = self._layout
        if layout is None or not self._begun:
            return
        if self._early.stop():
            self._send(layout)
        layout.give_up()
        self._begun = self._summed = self._kept = False

    def average(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace each gradient by its mean; every rank gives the same parameters (some twice) in the same order.

        Raises ``StrategyError`` if gradients existed before on some ranks only. Under ``static`` also if this rank has
        another set of gradients than in the first step.
        """
        self._early.stop()
        if not self._begun and not self._are_known(parameters):
            self._note(parameters)
        if not self._trained or self._group.size() == 1:
            return
        with torch.no_grad():
            if self._layout is None or self._sparse:
                self._ask()
            elif self._how.static:
                self._check_static(self._layout)
                self._finish(self._layout)
            elif not self._finish(self._layout):
                self._early.forbid()
                self._ask()
        self._begun = self._summed = self._kept = False

    def end(self) -> None:
        """Release all state and hooks."""
        self._early.end()
        self._layout = None
        for known in (self._given, self._trained, self._others, self._seen, self._sparse):
            known.clear()

    # ------------------------------------------------------------------------------------------------- what is known

    def _are_known(self, parameters: Sequence[nn.Parameter]) -> bool:
        return (
            len(parameters) == len(self._given)
            and all(map(is_, parameters, self._given))
            and [parameter.requires_grad for parameter in parameters] == self._wanted
        )

    def _note(self, parameters: Sequence[nn.Parameter]) -> None:
        """Set the parameters. Skips DTensors, which are averaged elsewhere, and meta parameters of other stages."""
        if self._first is not None:
            raise StrategyError(
                "-O static_graph=1, but other parameters are trained now than in the first step",
                "leave static_graph out",
            )
        self._given, self._wanted = list(parameters), [parameter.requires_grad for parameter in parameters]
        self._trained = [
            one
            for one in dict.fromkeys(self._given)
            if one.requires_grad and not isinstance(one, DTensor) and not one.is_meta
        ]
        self._lay_out()

    def _lay_out(self) -> None:
        known = [parameter for parameter in self._trained if parameter in self._seen]
        self._others = [parameter for parameter in self._trained if parameter not in self._seen]
        self._layout = None
        if known:
            counted = not self._how.static
            self._layout = BucketLayout(known, self._how.bucket_bytes, self._compression.divisor, counted=counted)
        self._compression.forget()
        self._early.end()

    def _ask(self) -> None:
        """Agree on which gradients exist, then average: in the first step, for new gradients, and with sparse ones.

        Costs one more all-reduce, and waits for its result.
        """
        if self._how.static and self._first is None:
            self._first = self._had()
        states = used_somewhere(self._trained, self._group)
        dense = {one for one, state in zip(self._trained, states, strict=True) if state not in (UNUSED, SPARSE)}
        sparse = {one for one, state in zip(self._trained, states, strict=True) if state == SPARSE} - self._seen
        if not (dense <= self._seen and sparse <= self._sparse):
            self._seen |= dense
            self._sparse = (self._sparse | sparse) - self._seen
            self._lay_out()
        for parameter, state in zip(self._trained, states, strict=True):
            if state == SPARSE and parameter in self._sparse:
                if self._summed and parameter.grad is not None:
                    parameter.grad = parameter.grad * self._group.size()
                average_sparse(parameter, self._group)
        if self._layout is not None:
            self._finish(self._layout)

    def _had(self) -> list[bool]:
        return [parameter.grad is not None for parameter in self._trained]

    def _check_static(self, layout: BucketLayout) -> None:
        """Raise unless this rank has the same gradients as in the first step, each computed once."""
        assert self._first is not None
        if self._early.twice:
            layout.give_up()
            raise StrategyError(
                "-O static_graph=1: a gradient was computed twice in this backward, and once in the earlier ones",
                "leave static_graph out",
            )
        layout.look()
        absent = {one for one, came in zip(layout.parameters, layout.came(), strict=True) if not came}
        missing = [one for one, had in zip(self._trained, self._first, strict=True) if had and one in absent]
        new = [one for one in self._others if one.grad is not None]
        for parameters, what in ((missing, "has no gradient, and had one"), (new, "has a gradient, and had none")):
            if parameters:
                layout.give_up()
                place = next(i for i, one in enumerate(self._trained) if one is parameters[0])
                raise StrategyError(
                    f"-O static_graph=1: after this backward trained parameter {place}, of shape "
                    f"{list(parameters[0].shape)}, {what} after the first",
                    "leave static_graph out: which parameters took part is then found each time",
                )

    # ---------------------------------------------------------------------------------------------------- the buckets

    def _finish(self, layout: BucketLayout) -> bool:
        """Send the remaining buckets, and take the means. False: some rank raised the alarm; more must be averaged.

        After ``begin`` that is done here: gradients outside the buckets are averaged separately, and added.
        """
        carrying, complete = bool(self._cargo), self._send(layout)
        for bucket in layout.buckets:
            bucket.wait()
        used: list[bool] | None = None
        alarms = 0.0
        if layout.counted and (self._begun or self._others or not complete):
            *had, alarms, kept = (told := layout.told(whole=not complete))[:-CARGO]
            ranks = self._group.size()
            if had:
                used = [number > 0.5 / ranks for number in had]
            if carrying:
                self.carried = told[-CARGO:]
            if self._begun and round(kept * (1 if self._summed else ranks)) not in (0, ranks):
                layout.give_up()
                raise StrategyError(
                    "before this backward some ranks had gradients and others had none",
                    "call zero_grad() in the same steps on every rank",
                )
        if alarms and self._begun:
            self._add(layout, used)
            return True
        layout.take(used, views=self._how.views or self._begun)
        return not alarms

    def _add(self, layout: BucketLayout, used: list[bool] | None) -> None:
        """Add to the means: gradients that came after their bucket was sent, or that have no bucket yet."""
        means = layout.means(used)
        layout.give_up()
        self._begun = False
        self._early.forbid()
        self._ask()
        for parameter, mean in means:
            parameter.grad = mean if parameter.grad is None else mean.add_(parameter.grad)

    def _send(self, layout: BucketLayout) -> bool:
        """Send all remaining buckets. Returns whether this rank had all gradients."""
        complete = layout.look()
        alarm = self._early.twice or any(one.grad is not None and one not in self._sparse for one in self._others)
        tail = layout.tail([*layout.came(), alarm, self._kept, *self._cargo])
        for bucket in layout.buckets:
            if not bucket.is_sent:
                self.send(bucket, tail)
        self._cargo = []
        return complete

    def send(self, bucket: Bucket, tail: Tensor | None = None) -> None:
        """Start to average a bucket. All ranks send the same buckets in the same order."""
        bucket.fill(tail if bucket.is_last else None, summed=self._summed)
        self._compression.send(bucket)
