"""This machine: the agent's unix socket. A job on GPUs has a place in the machine's queue until it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ..protocol.machine import tickets
from ..protocol.machine.inventory import gpus, local_inventory
from ..protocol.plan import Inventory, NodePlan, Plan, is_open
from ..protocol.process import check_ranks
from ..protocol.spec import Options
from ..protocol.wire.channel import Channel
from ..protocol.wire.connect import connect_agent
from . import turns
from .base import ENDED, QUEUED, ChannelPerNode, EngineState

if TYPE_CHECKING:
    from typing_extensions import Self


class LocalLauncher(ChannelPerNode):
    """The only node is this machine, which sees the job directory itself."""

    lasts: ClassVar[bool] = True

    def __init__(self) -> None:
        self._job = ""
        self._held: int | None = None
        self._state = EngineState()

    def probe(self, options: Options, environ: Mapping[str, str]) -> tuple[Inventory, ...]:
        check_ranks()
        return (local_inventory(environ),)

    def submit(self, plan: Plan, attempt: int) -> Self:
        self._take_place(plan)
        if _waits(plan):
            self._state = EngineState(QUEUED)
        return self

    def attach(self, plan: Plan, token: Mapping[str, Any]) -> Self:
        self._take_place(plan)
        if _waits(plan):  # the environment of the ranks went with the driver that waited
            reason = "its driver ended while the job waited for its turn, so the place is lost"
            self._state = EngineState(ENDED, reason=f"{reason}; `%dist rerun {plan.job}` takes a new one")
        return self

    def state(self) -> EngineState:
        if self._state.word == QUEUED:
            found = turns.turn(self._job, gpus())
            if found is None:
                self._state = EngineState(ENDED, reason="its place in the queue was deleted")
            elif found.gpus:
                tickets.grant(self._job, found.gpus)
                self._state = EngineState(gpus=found.gpus)
            else:
                self._state = EngineState(QUEUED, found.position, found.reason)
        return self._state

    def connect(self, node: NodePlan) -> Channel:
        fd = connect_agent(sys.executable).detach()
        return Channel(fd, fd)

    def shared(self, node: NodePlan) -> bool:
        return True

    def cancel(self) -> None:
        """Agents end their ranks themselves."""
        if self._held is not None:
            tickets.leave(self._job)
            os.close(self._held)
            self._held = None

    def _take_place(self, plan: Plan) -> None:
        self._job = plan.job
        if any(node.gpus for node in plan.nodes):
            self._held = tickets.hold(plan.job)


def _waits(plan: Plan) -> bool:
    return any(is_open(gpu) for node in plan.nodes for gpu in node.gpus)
