"""This machine: the agent's unix socket."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ..protocol.inventory import local_inventory
from ..protocol.plan import Inventory, NodePlan
from ..protocol.spec import Options
from ..protocol.wire.channel import Channel
from ..protocol.wire.connect import connect_agent
from .base import ChannelPerNode


class LocalLauncher(ChannelPerNode):
    """The only node is this machine, which sees the job directory itself."""

    def probe(self, options: Options, environ: Mapping[str, str]) -> tuple[Inventory, ...]:
        return (local_inventory(environ),)

    def connect(self, node: NodePlan) -> Channel:
        fd = connect_agent(sys.executable).detach()
        return Channel(fd, fd)

    def shared(self, node: NodePlan) -> bool:
        return True
