"""How far the clock of a node is ahead of ours, from the answers to pings."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from ..protocol.errors import StoreError
from ..protocol.wire.messages import Ping
from ..store.files import publish_json

NOTED_SECONDS = 0.02
"""A smaller change is not written: logs are merged with a resolution of 0.2 s."""

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


def written(path: Path, clock: Clock, before: float) -> float:
    """Write how far the clock is ahead, for readers of the node's logs, if that is not ``before``, and no error.

    Returns what is written now.
    """
    if abs(clock.ahead - before) < max(NOTED_SECONDS, clock.within):
        return before
    with contextlib.suppress(StoreError):  # the next answer is another try
        publish_json(path, {"ahead": clock.ahead})
        return clock.ahead
    return before
