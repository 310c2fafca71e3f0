"""What is done with gradients while the backward that makes them still runs: copied into buckets, and sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .layout import Bucket, Layout

REGULAR = 3
"""Steps alike before anything is done within the backward; the last of them shows the order of the gradients."""
HANDFUL = 512 * 1024
"""Bytes of gradients that are copied together, by one call: they still lie in the processor's cache."""

Place = tuple[int, int]
"""A bucket, and a gradient in it."""


class Early:
    """Fills buckets while the backward still runs, and sends those that are full, once steps were seen to be alike.

    The last of those shows in which order gradients come. The last bucket, which tells what came, is sent after the
    backward. A gradient that comes a second time (reentrant checkpointing) to a bucket that was sent raises the alarm,
    and all is averaged again, afterwards. ``send`` begins to average a bucket; every rank sends them in one order.
    """

    def __init__(self, send: Callable[[Bucket], None]) -> None:
        self._send = send
        self._alike = 0
        self._forbidden = False
        self._handles: list[Any] = []
        self._buckets: list[Bucket] = []
        self._order: dict[Place, nn.Parameter] = {}
        self._sent = 0
        self._armed = False
        self.twice = False
        """Whether, in the backward that has ended, a gradient came again that had been sent."""

    def begin(self, layout: Layout, *, regular: bool) -> None:
        """A backward begins. ``regular``: nothing in it communicates."""
        self.twice = False
        if self._forbidden or not regular:
            return
        self._alike += 1
        if self._alike == REGULAR:
            self._watch(layout)
        elif self._alike > REGULAR:
            if self._alike == REGULAR + 1:
                self._hook()
            self._sent, self._armed = 0, True

    def _watch(self, layout: Layout) -> None:
        self._buckets = layout.buckets
        for number, bucket in enumerate(layout.buckets):
            for piece, parameter in enumerate(bucket.parameters):
                note = partial(self._note, (number, piece))
                self._handles.append(parameter.register_post_accumulate_grad_hook(note))

    def _note(self, place: Place, parameter: nn.Parameter) -> None:
        self._order.pop(place, None)
        self._order[place] = parameter

    def _hook(self) -> None:
        """A call for each handful, not for each gradient."""
        self._unhook()
        for bucket, pieces in self._handfuls():
            last = self._buckets[bucket].parameters[pieces[-1]]
            arrived = partial(self._arrived, self._buckets[bucket], pieces)
            self._handles.append(last.register_post_accumulate_grad_hook(arrived))

    def _handfuls(self) -> list[tuple[int, list[int]]]:
        """Of each bucket, gradients that come one after the other."""
        found: list[tuple[int, list[int]]] = []
        open_: dict[int, list[int]] = {}
        room: dict[int, int] = {}
        for (bucket, piece), parameter in self._order.items():
            if room.get(bucket, 0) <= 0:
                open_[bucket], room[bucket] = [], HANDFUL
                found.append((bucket, open_[bucket]))
            open_[bucket].append(piece)
            room[bucket] -= parameter.numel() * parameter.element_size()
        return found

    def _arrived(self, bucket: Bucket, pieces: Sequence[int], _parameter: Tensor) -> None:
        if not self._armed or bucket.is_sent:
            return
        with torch.no_grad():
            bucket.copy(pieces)
            while self._sent < len(self._buckets) - 1 and self._buckets[self._sent].is_full:
                self._send(self._buckets[self._sent])
                self._sent += 1

    def stop(self) -> bool:
        """The backward has ended. Whether buckets may have been sent in it."""
        was, self._armed = self._armed, False
        if was:
            again = [bucket.came_again() for bucket in self._buckets]
            self.twice = any(again[: self._sent])
        return was

    def forbid(self) -> None:
        """Some rank raised the alarm, on all ranks alike: no bucket is sent early any more."""
        self._forbidden = self._forbidden or bool(self._buckets)
        self.end()

    def end(self) -> None:
        """No hook is left."""
        self._unhook()
        self._order.clear()
        self._buckets, self._alike, self._armed, self.twice = [], 0, False, False

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
