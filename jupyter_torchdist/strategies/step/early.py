"""Sends full buckets of gradients while the backward is still running."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .layout import Bucket, BucketLayout

REGULAR = 3
"""Number of regular steps before buckets are sent early; the last of them shows the order of the gradients."""


class Early:
    """Sends full buckets while the backward is still running, after ``REGULAR`` regular steps.

    The last of these steps shows which gradient completes a bucket. The last bucket, which tells which gradients came,
    is sent after the backward. A gradient that comes again after its bucket was sent (reentrant checkpointing) raises
    the alarm, and is averaged later. ``send`` starts to average a bucket; all ranks send buckets in the same order.
    """

    def __init__(self, send: Callable[[Bucket], None]) -> None:
        self._send = send
        self._alike = 0
        self._forbidden = False
        self._handles: list[Any] = []
        self._buckets: list[Bucket] = []
        """All buckets but the last."""
        self._fills: dict[Bucket, nn.Parameter] = {}
        self._sent = 0
        self._armed = False
        self.twice = False
        """Whether a gradient came again after it was sent, in the backward that has ended."""

    def begin(self, layout: BucketLayout, *, regular: bool) -> None:
        """A backward begins. ``regular``: it does not communicate."""
        self.twice = False
        if self._forbidden or not regular or len(layout.buckets) == 1:
            return
        self._alike += 1
        if self._alike == REGULAR:
            self._watch(layout)
        elif self._alike > REGULAR:
            if self._alike == REGULAR + 1:
                self._hook()
            self._sent, self._armed = 0, True

    def _watch(self, layout: BucketLayout) -> None:
        self._buckets = layout.buckets[:-1]
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                note = partial(self._note, bucket)
                self._handles.append(parameter.register_post_accumulate_grad_hook(note))

    def _note(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        self._fills[bucket] = parameter

    def _hook(self) -> None:
        """Hook only the last gradient of each bucket: one call per bucket, not one per gradient."""
        self._unhook()
        for parameter in self._fills.values():
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._arrived))

    def _arrived(self, _parameter: Tensor) -> None:
        """A hook: the last gradient of a bucket has come. Sends all buckets that are full, in order."""
        if not self._armed:
            return
        with torch.no_grad():
            while self._sent < len(self._buckets) and self._buckets[self._sent].look():
                self._send(self._buckets[self._sent])
                self._buckets[self._sent].let_go()
                self._sent += 1

    def stop(self) -> bool:
        """The backward has ended. Returns whether buckets may have been sent early."""
        was, self._armed = self._armed, False
        if was:
            sent = self._buckets[: self._sent]
            self.twice = any(parameter.grad is not None for bucket in sent for parameter in bucket.parameters)
        return was

    def forbid(self) -> None:
        """After an alarm, which all ranks see: never send buckets early again."""
        self._forbidden = self._forbidden or bool(self._buckets)
        self.end()

    def end(self) -> None:
        """Remove all hooks."""
        self._unhook()
        self._fills.clear()
        self._buckets, self._alike, self._armed, self.twice = [], 0, False, False

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
