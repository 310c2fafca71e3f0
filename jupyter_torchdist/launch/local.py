"""This machine: the agent's unix socket."""

from __future__ import annotations

import sys

from ..protocol.channel import Channel
from ..protocol.connect import connect_agent
from ..protocol.plan import NodePlan


class LocalLauncher:
    """The only node is this machine, which sees the job directory itself."""

    def connect(self, node: NodePlan) -> Channel:
        fd = connect_agent(sys.executable).detach()
        return Channel(fd, fd)

    def shared(self, node: NodePlan) -> bool:
        return True
