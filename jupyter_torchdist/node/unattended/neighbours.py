"""The nodes of a job hear each other, so that the job ends when one of them dies while no driver is connected.

The first node's agent is the *steward*: it hears all others, and they hear it. A beat goes each way every second, as a
UDP datagram of ``protocol/wire/beats.py``. Only a node that was heard before can be missed, so where a firewall stops
the beats, nothing is decided. While a driver is connected to any node, it decides, and nobody is missed.

When an attempt has ended because nodes are missed, the nodes that are left may begin another one (``again.py``). They
go on with the same sockets and the same secret. If the steward is missed, the second node takes its place.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ...protocol.errors import ChannelError
from ...protocol.wire.again import Again
from ...protocol.wire.beats import LONGEST, Beat, Part, opened, sealed
from ...protocol.wire.messages import Steward

BEAT_SECONDS = 1.0

PATIENCE_SECONDS = 15.0
"""A node of which nothing was heard for this time is missed. Less silence changes nothing."""

REACH_SECONDS = 10.0
"""A node that has not heard the steward for this time since it was told of it says so."""

LAST_WORDS_SECONDS = PATIENCE_SECONDS + 5.0
"""For so long a node says that its part has ended: the others may hear nothing for a while."""

MOST = 1000
"""Datagrams that are read at once: a flood of nonsense must not hold up the agent."""


@dataclass
class Neighbour:
    """What was heard of another node. Times are in seconds on this node's monotonic clock."""

    address: Any = None
    """Where it hears us; None before it has spoken."""
    number: int = -1
    heard: float | None = None
    part: Part = "runs"


class Neighbours:
    """``others`` are the names of the nodes to hear: of the steward all others in their order, of those the steward.

    Owns ``udp``. ``node`` is our own name.
    """

    def __init__(self, place: Steward, udp: socket.socket, node: str, others: Iterable[str], *, leads: bool) -> None:
        self.place = place
        self._udp, self._node, self.leads = udp, node, leads
        udp.setblocking(False)
        self._others = {name: Neighbour() for name in others}
        self._began = self._turned = self._attended = time.monotonic()
        """``_attended``: when a driver was known to be connected to any node at last."""
        self._beat_at = 0.0
        self._ended: float | None = None
        self._lost: tuple[str, ...] = ()
        self._second: tuple[str, int] | None = None
        self.asked: Again | None = None
        """The next attempt, as the steward tells it, or as this steward tells the others."""
        self._complained = False
        self.closed = False

    @staticmethod
    def of_steward(job: str, attempt: int, address: str, node: str, others: Iterable[str]) -> Neighbours:
        """Hear the others at a free port of ``address``. Raises ``OSError``."""
        udp = socket.socket(_family(address), socket.SOCK_DGRAM)
        try:
            udp.bind((address, 0))
        except OSError:
            udp.close()
            raise
        place = Steward(job, attempt, address, int(udp.getsockname()[1]), secrets.token_hex(32))
        return Neighbours(place, udp, node, others, leads=True)

    @staticmethod
    def of_another(place: Steward, node: str, steward: str) -> Neighbours:
        """Hear the steward alone. Raises ``OSError``: no route."""
        udp = socket.socket(_family(place.address), socket.SOCK_DGRAM)
        try:
            with socket.socket(udp.family, socket.SOCK_DGRAM) as probe:
                probe.connect((place.address, place.port))  # sends nothing
                udp.bind((probe.getsockname()[0], 0))
        except OSError:
            udp.close()
            raise
        neighbours = Neighbours(place, udp, node, [steward], leads=False)
        neighbours._others[steward].address = (place.address, place.port)
        return neighbours

    def turn(self, now: float, part: Part, attended: bool) -> tuple[str, ...] | None:
        """Hear, speak, and judge. None: the job goes on.

        Otherwise it must end here, because of the nodes that are missed; empty if another node's part fell short.
        ``part``: how this node's part stands. ``attended``: whether a driver is connected to this node.
        """
        if self.closed:
            return None
        self._hear(now)
        if attended or now - self._turned > 3 * BEAT_SECONDS:  # this process stood still, and knows nothing of others
            self._attended = max(now, self._attended)
        self._turned = now
        self._judge(now)
        if now >= self._beat_at:
            self._beat_at = now + BEAT_SECONDS
            told: Part = "short" if self._lost and part == "runs" else part
            self._speak(told, attended or (self.leads and self._known(now)))
        self._look_for_the_end(now, part)
        if self._lost:
            return self._lost
        fell_short = any(other.part == "short" for other in self._others.values()) and not self._known(now)
        return () if fell_short and part == "runs" else None

    def _known(self, now: float) -> bool:
        """Whether a driver was connected a moment ago, to any node."""
        return now - self._attended <= 3 * BEAT_SECONDS

    # -- another attempt

    def succeed(self, order: list[str], now: float) -> None:
        """The steward is missed. ``order``: the nodes that are left, of which the first takes its place."""
        self.leads = order[0] == self._node
        if self.leads:
            self._others = {name: Neighbour(heard=now) for name in order[1:]}
        else:
            self._others = {order[0]: Neighbour(self._second)}

    def gathered(self, left: Iterable[str], now: float) -> bool:
        """Whether every part of the attempt has ended on the nodes ``left``, and no driver decides."""
        parts = [self._others[name].part for name in left if name != self._node]
        return "runs" not in parts and not self._known(now)

    @property
    def lost(self) -> tuple[str, ...]:
        return self._lost

    def renew(self, attempt: int, left: list[str], now: float) -> Steward:
        """Go on with another attempt on the nodes ``left``. Returns where its steward hears the others."""
        first = left[0]
        where = self._udp.getsockname() if self.leads else self._others[first].address
        self.place = replace(self.place, attempt=attempt, address=str(where[0]), port=int(where[1]))
        names = left[1:] if self.leads else [first]
        self._others = {name: replace(self._others[name], heard=None, part="runs") for name in names}
        self._began, self._beat_at = now, 0.0
        self._ended, self._lost, self.asked = None, (), None
        return self.place

    def ask(self, again: Again, now: float) -> None:
        """Tell the others of the attempt, and expect them in it."""
        self.asked, self._beat_at = again, 0.0
        self._others = {name: replace(other, heard=other.heard or now) for name, other in self._others.items()}

    def _hear(self, now: float) -> None:
        for _ in range(MOST):
            try:
                datagram, source = self._udp.recvfrom(LONGEST)
            except BlockingIOError:
                return
            except OSError:
                continue  # nobody listens there at the moment
            with contextlib.suppress(ChannelError):
                self._take(opened(datagram, self.place.secret), source, now)

    def _take(self, beat: Beat, source: Any, now: float) -> None:
        other = self._others.get(beat.node)
        later = beat.attempt > self.place.attempt and not self.leads
        known = later or beat.attempt == self.place.attempt
        if other is None or beat.job != self.place.job or not known or beat.number <= other.number:
            return
        other.number = beat.number
        if later:
            self.asked, self._ended = beat.again or self.asked, None  # its words are still to come
            return
        other.heard, other.part, self._second = now, beat.part, beat.second or self._second
        if self.leads:
            if other.address is None:
                self._beat_at = 0.0  # at once, so that all know where the second node hears them before this one dies
            other.address = source
        if beat.driver:
            self._attended = now
        elif lost := tuple(name for name in beat.lost if name != self._node):
            self._lost = self._lost or lost

    def _judge(self, now: float) -> None:
        if self._lost and not self.leads:
            return
        self._lost += tuple(
            name
            for name, other in self._others.items()
            if name not in self._lost
            and other.heard is not None
            and other.part == "runs"
            and now - max(other.heard, self._attended) > PATIENCE_SECONDS
        )

    def _speak(self, part: Part, driver: bool) -> None:
        lost = self._lost if self.leads else ()
        again, second = (self.asked, self._where_second()) if self.leads else (None, None)
        place, number = self.place, time.monotonic_ns()
        beat = Beat(place.job, place.attempt, self._node, number, part, driver, lost, second, again)
        datagram = sealed(beat, self.place.secret)
        for other in self._others.values():
            with contextlib.suppress(OSError):  # no route at the moment, or no room in the queue
                if other.address is not None:
                    self._udp.sendto(datagram, other.address)

    def _where_second(self) -> tuple[str, int] | None:
        first = next(iter(self._others.values()), Neighbour())
        return (str(first.address[0]), int(first.address[1])) if first.address else None

    def _look_for_the_end(self, now: float, part: Part) -> None:
        if part == "runs":
            return
        self._ended = now if self._ended is None else self._ended
        if now - self._ended > LAST_WORDS_SECONDS:
            self.close()

    def unheard(self, now: float) -> bool:
        """True once, if the steward should have been heard by now."""
        silent = not self.leads and all(other.heard is None for other in self._others.values())
        if self.closed or self._complained or not silent or now - self._began < REACH_SECONDS:
            return False
        self._complained = True
        return True

    def close(self) -> None:
        self.closed = True
        self._udp.close()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
