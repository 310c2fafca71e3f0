"""What an engine is to the driver, and what a driver and an agent say to each other.

=============  ========================================================================================
driver says    with
=============  ========================================================================================
hello          process: who drives
warm           python, environ: have a warm process ready for such jobs
prepare        job, files {name: text}, blobs [digest]: for a node without the driver's disk
blob           digest, offset, last + bytes
start          assignment, shared, offsets
follow         job, job_root, node, ranks, attempt, shared, offsets: take up a job, ship from the offsets on
signal         job, signal: to every rank
stacks         job: every rank writes its stacks
end            job, grace: SIGTERM, after ``grace`` seconds SIGKILL; nothing is left
forget         job: the driver has everything
ping           t
stop_warm      end warm processes and the agent, once no job runs
=============  ========================================================================================

=============  ========================================================================================
agent says     with
=============  ========================================================================================
welcome        process, inventory, warm, jobs
missing        job, blobs [digest]
stored         digest, right
grown          job, file, size: a file that both see has grown
bytes          job, file, offset + bytes: what is new in a file of the node's own
whole          job, file + bytes: the latest version of a file that is replaced (the gauges)
ended          job, attempt: nothing of the job is alive on the node, everything was shipped
stalled        job, attempt, ranks: they hang before their first user line
refused        job, reason: the node cannot do what it was told (a full disk, no process to be had)
pong           t
=============  ========================================================================================
"""

from __future__ import annotations

from typing import Protocol

from ..protocol.channel import Channel
from ..protocol.plan import NodePlan


class Connector(Protocol):
    """How an engine with one channel a node (this machine, SSH) reaches its agents."""

    def connect(self, node: NodePlan) -> Channel:
        """A new channel to the node's agent. Raises ``LaunchError`` when the node cannot be reached."""

    def shared(self, node: NodePlan) -> bool:
        """Whether the node sees the driver's job directory on a local disk."""
