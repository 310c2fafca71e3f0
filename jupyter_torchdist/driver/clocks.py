"""How far the clock of a node is ahead of ours, from the answers to pings."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from ..protocol.errors import StoreError
from ..protocol.times import CLOCK_SECONDS
from ..protocol.wire.messages import Ping
from ..store.files import publish_json

NOTED_SECONDS = 0.02
"""A smaller change is not written: logs are merged with a resolution of 0.2 s."""

SURE_SECONDS, SURE_ANSWERS = 0.05, 10
"""A node's clock is asked for often, until the error is so small, or so many answers have come."""

SLOWER = 2.0
"""An answer counts if it took at most so many times as long as the last one that counted: clocks drift."""


@dataclass(frozen=True)
class Clock:
    """Seconds that a node's clock is ahead of this one, and the largest error."""

    ahead: float
    within: float


def compared(known: Clock | None, pong: Ping, now: float, wall: float) -> Clock | None:
    """``known``, or what the pong tells better. ``now`` is on the clock of pings, ``wall`` in seconds since the epoch.

    The node read its clock while the message was on its way, so half of the way is the error.
    """
    error = max(now - pong.t, 0.0) / 2
    if not pong.clock or (known is not None and error > SLOWER * known.within):
        return known
    return Clock(pong.clock - (wall - error), error)


class NodeClock:
    """What is known of a node's clock. ``path``: for readers of the node's logs; None: it has this driver's disk."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.known: Clock | None = None
        """Once the node has answered a ping."""
        self._written = 0.0
        self._answers = 0
        self._told = False

    @property
    def sure(self) -> bool:
        """Whether more answers would tell little. The first one waited until the node had our code."""
        good = self.known is not None and self.known.within <= SURE_SECONDS
        return self._path is None or good or self._answers >= SURE_ANSWERS

    def hear(self, pong: Ping, now: float, wall: float) -> None:
        """Learn from an answer, as ``compared``. A difference that is new, and no error, is written."""
        self._answers += 1
        self.known = clock = compared(self.known, pong, now, wall)
        if clock is None or self._path is None or abs(clock.ahead - self._written) < max(NOTED_SECONDS, clock.within):
            return
        with contextlib.suppress(StoreError):  # the next answer is another try
            publish_json(self._path, {"ahead": clock.ahead})
            self._written = clock.ahead

    def news(self, host: str) -> str:
        """A sentence, once, if the clock is wrong by more than ``CLOCK_SECONDS``; else empty."""
        if self._told or self.known is None or self._path is None:
            return ""
        ahead, within = self.known.ahead, self.known.within
        if abs(ahead) - within < CLOCK_SECONDS:
            return ""
        self._told = True
        way = "ahead of" if ahead > 0 else "behind"
        return (
            f"warning: the clock of {host} is {abs(ahead):.0f} s {way} this machine's. Lines of logs stand where they "
            "belong all the same, but times that ranks print or compare differ; start chrony or ntpd there"
        )
