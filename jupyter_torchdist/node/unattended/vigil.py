"""One node's part in hearing the other nodes of a job: where they meet, and what follows when one is missed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...protocol.plan import Plan
from ...protocol.wire.again import Again, left
from ...protocol.wire.beats import Part
from ...protocol.wire.messages import Steward
from .neighbours import PATIENCE_SECONDS, Neighbours

STOP_GRACE = 1.0
"""Grace in seconds for ranks that only wait for those of a node that is gone."""


class Vigil:
    """``say`` writes an event of the agent."""

    def __init__(self, plan: Plan, node: str, attempt: int, say: Callable[..., None]) -> None:
        self._neighbours: Neighbours | None = None
        self._again: Again | None = None
        """The attempt that this steward has begun, and does not yet tell the others of."""
        self._watch(plan, node, attempt, say)

    def _watch(self, plan: Plan, node: str, attempt: int, say: Callable[..., None]) -> None:
        self._plan, self._attempt, self._say = plan, attempt, say
        self._own = next(one for one in plan.nodes if one.name == node)
        self._steward = plan.nodes[0]
        self._missed = self._given_up = False

    def lead(self) -> Steward | None:
        """Where this node hears the others, if it is the first of several."""
        others = [node.name for node in self._plan.nodes[1:]]
        if self._own is not self._steward or not others:
            return None
        if self._neighbours is None:
            address, job = self._own.address, self._plan.job
            try:
                self._neighbours = Neighbours.of_steward(job, self._attempt, address, self._own.name, others)
            except OSError as error:
                self._say_deaf(f"no port can be opened at {address} ({error.strerror})")
                return None
        return self._neighbours.place

    def join(self, place: Steward) -> None:
        """Hear the steward there, and be heard by it."""
        if self._neighbours is not None and self._neighbours.place == place:
            return
        self.close()
        try:
            self._neighbours = Neighbours.of_another(place, self._own.name, self._steward.name)
        except OSError as error:
            self._say_deaf(f"there is no way to {place.address} ({error.strerror})")

    def turn(self, now: float, part: Part, attended: bool) -> float | None:
        """Hear and speak. Returns the grace in seconds with which the job must end here; None: it goes on.

        ``part``: how this node's part stands (``protocol/wire/beats.py``). ``attended``: a driver is connected to it.
        """
        if self._neighbours is None:
            return None
        missed = self._neighbours.turn(now, part, attended)
        if self._neighbours.unheard(now):
            place = self._neighbours.place
            self._say_deaf(f"nothing comes from {place.address}, port {place.port} (UDP)")
        if missed and not self._missed:
            self._missed = True
            self._say("node.missed", nodes=list(missed), seconds=PATIENCE_SECONDS)
            if self._steward.name in missed:
                self._neighbours.succeed([node.name for node in left(self._plan.nodes, missed)], now)
        return None if missed is None else STOP_GRACE if missed else self._plan.grace

    def _say_deaf(self, why: str) -> None:
        text = (
            f"{self._own.called} does not hear {self._steward.called}: {why}. If one of them dies while no driver is "
            "connected, the ranks of the other wait until --lease ends"
        )
        self._say("job.note", text=text)

    # -- another attempt

    @property
    def asked(self) -> Again | None:
        """What the steward has asked for; None: nothing, or this is the steward."""
        neighbours = self._neighbours
        return None if neighbours is None or neighbours.leads else neighbours.asked

    def gathered(self, now: float) -> tuple[str, ...]:
        """The nodes that are missed, once the attempt has ended on all others and this is their steward; else none."""
        neighbours = self._neighbours
        if neighbours is None or neighbours.closed or not neighbours.leads or self._given_up:
            return ()
        names = [node.name for node in left(self._plan.nodes, neighbours.lost)]
        return neighbours.lost if neighbours.gathered(names, now) else ()

    def give_up(self) -> None:
        """There is no other attempt before a driver comes."""
        self._given_up = True

    def renew(self, plan: Plan, again: Again, say: Callable[..., None], now: float) -> None:
        """Go on with that attempt, which ``plan`` is of."""
        assert self._neighbours is not None
        self._watch(plan, self._own.name, again.attempt, say)
        if len(plan.nodes) == 1:
            self.close()
            return
        self._neighbours.renew(again.attempt, [node.name for node in plan.nodes], now)
        self._again = again if self._neighbours.leads else None

    def tell(self, endpoint: tuple[str, int], now: float) -> None:
        """Tell the others of the attempt, whose ranks meet there."""
        if self._again is not None and self._neighbours is not None:
            self._neighbours.ask(replace(self._again, rendezvous=endpoint), now)
            self._again = None

    @property
    def speaks(self) -> bool:
        """Whether the others may still have to hear how this node's part stands."""
        return self._neighbours is not None and not self._neighbours.closed

    def close(self) -> None:
        if self._neighbours is not None:
            self._neighbours.close()
