"""One node's part in hearing the other nodes of a job: where they meet, and what follows when one is missed."""

from __future__ import annotations

from collections.abc import Callable

from ...protocol.plan import Plan
from ...protocol.wire.beats import Part
from ...protocol.wire.messages import Steward
from .neighbours import PATIENCE_SECONDS, Neighbours

STOP_GRACE = 1.0
"""Grace in seconds for ranks that only wait for those of a node that is gone."""


class Vigil:
    """``say`` writes an event of the agent."""

    def __init__(self, plan: Plan, node: str, attempt: int, say: Callable[..., None]) -> None:
        self._plan, self._attempt, self._say = plan, attempt, say
        self._own = next(one for one in plan.nodes if one.name == node)
        self._steward = plan.nodes[0]
        self._neighbours: Neighbours | None = None
        self._missed = False

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
        return None if missed is None else STOP_GRACE if missed else self._plan.grace

    def _say_deaf(self, why: str) -> None:
        text = (
            f"{self._own.called} does not hear {self._steward.called}: {why}. If one of them dies while no driver is "
            "connected, the ranks of the other wait until --lease ends"
        )
        self._say("job.note", text=text)

    @property
    def speaks(self) -> bool:
        """Whether the others may still have to hear how this node's part stands."""
        return self._neighbours is not None and not self._neighbours.closed

    def close(self) -> None:
        if self._neighbours is not None:
            self._neighbours.close()
