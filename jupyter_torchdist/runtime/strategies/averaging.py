"""The automatic way's gradients, averaged over the ranks after each backward: what DDP's reducer does, and its options.

DDP counts the gradients that its own forward announced. Here any backward of any cell may come (several a step, a
gradient penalty, another branch on each rank), so a rank tells with its gradients which of them it had: a number for
each travels at the end of the last bucket. A gradient that is None on some ranks counts as zeros there; one that is
None on all stays None. Averaging what is the same on all ranks already changes nothing, so accumulated gradients may
be averaged again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...protocol.errors import StrategyError
from ...protocol.strategy import DIMENSIONS, StrategyPlan
from ...protocol.strategy_options import chosen
from .compression import Compression
from .gradients import SPARSE, UNUSED, average_sparse, used_somewhere
from .layout import Bucket, Layout

REGULAR = 3
"""Steps alike before gradients are sent while the backward still runs."""


@dataclass(frozen=True)
class How:
    """DDP's options. ``static``: the same gradients come in each backward.

    ``views``: gradients that were there before the backward are views of the buckets, too, as new ones always are.
    ``early``: nothing else is done to gradients after they have come.
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


_OURS = (__name__.rpartition(".")[0], "torch.distributed")


def check(model: nn.Module) -> None:
    """Raise ``StrategyError`` for a cell that takes gradients as they come: an optimizer's step within the backward."""
    for name, parameter in model.named_parameters():
        hooks: dict[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for hook in hooks.values():
            if not str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith(_OURS):
                raise StrategyError(
                    f"{name}.register_post_accumulate_grad_hook: a hook would see this rank's gradient, which is "
                    "averaged over the ranks after the backward",
                    "do after backward() what the hook does",
                )


class Averaging:
    """Averages the gradients of the parameters that it is given, on all ranks of ``group`` alike.

    What is known of the gradients (which have ever come, whether any is sparse) is the same on all ranks, and so is
    their order in the buckets.
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
        self._layout: Layout | None = None
        self._first: list[bool] | None = None  # which gradients this rank had, when they are to stay the same
        self._new: list[bool] | None = None  # which gradients are to come, in this backward
        self._early = Early(self)

    # -------------------------------------------------------------------------------------------------- a backward

    def begin(self, *, silent: bool, create_graph: bool = False) -> None:
        """A backward begins. ``silent``: nothing in it communicates; ``create_graph``: of the gradients, too."""
        layout = self._layout
        if layout is None or create_graph:
            return
        self._new = [parameter.grad is None for parameter in layout.parameters]
        if len(layout.buckets) > 1 and self._may_be_early:
            self._early.begin(layout, regular=silent)

    @property
    def _may_be_early(self) -> bool:
        """Views would be written by the backward while they are sent."""
        return self._how.early and self._compression.early and not self._how.views and not self._sparse

    def fail(self) -> None:
        """The backward raised: buckets that other ranks may have sent are sent, and forgotten."""
        self._new = None
        if self._early.stop() and self._layout is not None:
            self._send(self._layout, alarm=True)
            self._layout.clear()

    def average(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace each gradient by its mean; every rank names the same parameters (some twice) in the same order.

        Raises ``StrategyError`` under ``static`` when this rank's gradients are others than the first time.
        """
        irregular = self._early.stop() and self._early.twice
        if not self._are_known(parameters):
            self._note(parameters)
        if not self._trained or self._group.size() == 1:
            return
        with torch.no_grad():
            if self._layout is None or self._sparse:
                self._ask()
            elif self._how.static:
                self._check_static(self._layout, irregular=irregular)
                self._finish(self._layout, irregular=False)
            elif not self._finish(self._layout, irregular=irregular):
                self._early.forbid()
                self._ask()
        self._new = None

    def end(self) -> None:
        """Let go of everything."""
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
        """DTensors average themselves; parameters without values (meta) are those of another stage."""
        if self._first is not None:
            raise StrategyError(
                "-O static_graph=1, and other parameters are trained now than at first", "leave static_graph out"
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
        self._new = None
        self._layout = None
        if known:
            counted = not self._how.static
            self._layout = Layout(known, self._how.bucket_bytes, self._compression.divisor, counted=counted)
        self._compression.forget()
        self._early.end()

    def _ask(self) -> None:
        """All ranks say what they have, then average it: at first, when something new has come, and beside sparse ones.

        One more all-reduce, whose result is read.
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
                average_sparse(parameter, self._group)
        if self._layout is not None:
            self._finish(self._layout, irregular=False)

    def _had(self) -> list[bool]:
        return [parameter.grad is not None for parameter in self._trained]

    def _check_static(self, layout: Layout, *, irregular: bool) -> None:
        """A gradient that this rank had at first is there; one that no rank had is not; none came twice of late."""
        assert self._first is not None
        if irregular:
            layout.clear()
            raise StrategyError(
                "-O static_graph=1: a gradient came twice in this backward, and once in those before",
                "leave static_graph out",
            )
        missing = [one for one, had in zip(self._trained, self._first, strict=True) if had and one.grad is None]
        new = [one for one in self._others if one.grad is not None]
        for parameters, what in ((missing, "has no gradient, and had one"), (new, "has a gradient, and had none")):
            if parameters:
                place = next(i for i, one in enumerate(self._trained) if one is parameters[0])
                raise StrategyError(
                    f"-O static_graph=1: after this backward trained parameter {place}, of shape "
                    f"{list(parameters[0].shape)}, {what} after the first",
                    "leave static_graph out: which parameters took part is then found each time",
                )

    # ---------------------------------------------------------------------------------------------------- the buckets

    def _finish(self, layout: Layout, *, irregular: bool) -> bool:
        """Send what is not sent yet, and take the means. False: some rank raised the alarm, there is more to average.

        What was sent too early is no mean of anything, and is not taken then.
        """
        mine = irregular or any(one.grad is not None and one not in self._sparse for one in self._others)
        complete, alarm = self._send(layout, alarm=mine), False
        for bucket in layout.buckets:
            bucket.wait()
        used: list[bool] | None = None
        if layout.counted and not (complete and not self._others and not self._early.on):
            *used, alarm = [share > 0.5 / self._group.size() for share in layout.counts()]
            if alarm and self._early.on:
                layout.clear()
                return False
        views = [self._how.views] * len(layout.parameters)
        layout.take(used, views if self._how.views or self._new is None else self._new)
        return not alarm

    def _send(self, layout: Layout, *, alarm: bool) -> bool:
        """Whether this rank had all gradients."""
        complete = all(parameter.grad is not None for parameter in layout.parameters)
        tail = layout.tail(None if complete else [one.grad is not None for one in layout.parameters], alarm=alarm)
        for bucket in layout.buckets:
            if not bucket.is_sent:
                self.send(bucket, tail)
        return complete

    def send(self, bucket: Bucket, tail: Tensor | None = None) -> None:
        """Begin to average a bucket. Every rank sends the same ones in the same order."""
        bucket.fill(tail if bucket.is_last else None, in_place=self._how.views)
        self._compression.send(bucket)


class Early:
    """Sends full buckets while the backward still runs, once steps have been seen to be alike.

    The last bucket, which tells what came, is sent after it. A gradient that comes a second time in one backward
    (reentrant checkpointing) was sent too early: the alarm is raised, and all is averaged again, afterwards.
    """

    def __init__(self, averaging: Averaging) -> None:
        self._averaging = averaging
        self._alike = 0
        self._forbidden = False
        self._handles: list[Any] = []
        self._buckets: list[Bucket] = []
        self._missing: list[int] = []
        self._came: list[bool] = []
        self._next = 0
        self._armed = False
        self.twice = False

    @property
    def on(self) -> bool:
        """The same on all ranks."""
        return bool(self._handles)

    def begin(self, layout: Layout, *, regular: bool) -> None:
        if self._forbidden or not regular:
            return
        self._alike += 1
        if self._alike <= REGULAR:
            return
        if not self._handles:
            self._watch(layout)
        self._missing = [len(bucket.parameters) for bucket in self._buckets]
        self._came = [False] * len(self._handles)
        self._next, self._armed, self.twice = 0, True, False

    def _watch(self, layout: Layout) -> None:
        self._buckets = layout.buckets
        number = 0
        for place, bucket in enumerate(layout.buckets):
            first = number
            for parameter in bucket.parameters:
                hook = partial(self._arrived, number, place, number - first)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
                number += 1

    def _arrived(self, number: int, place: int, number_within: int, _parameter: Tensor) -> None:
        if not self._armed:
            return
        if self._came[number]:
            self.twice = True
            return
        self._came[number] = True
        self._buckets[place].lay(number_within)
        self._missing[place] -= 1
        while self._next < len(self._buckets) - 1 and not self._missing[self._next]:
            with torch.no_grad():
                self._averaging.send(self._buckets[self._next])
            self._next += 1

    def stop(self) -> bool:
        """The backward has ended. Whether buckets may have been sent in it."""
        was, self._armed = self._armed, False
        return was

    def forbid(self) -> None:
        """Some rank raised the alarm, on all ranks alike: no bucket is sent early any more."""
        self._forbidden = self._forbidden or self.on
        self.end()

    def end(self) -> None:
        """No hook is left."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._buckets, self._alike, self._armed = [], 0, False
