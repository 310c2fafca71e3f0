"""What an engine is to the driver. What driver and agents say to each other is in ``protocol/wire/messages.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ..protocol.plan import Inventory, NodePlan, Plan
from ..protocol.spec import Options
from ..protocol.wire.channel import Channel

if TYPE_CHECKING:
    from typing_extensions import Self

QUEUED, RUNNING, ENDED = "queued", "running", "ended"


@dataclass(frozen=True)
class EngineState:
    """State of a submission, as the engine reports it.

    ``word`` is ``queued`` (no agent was started yet), ``running`` (agents run or are starting) or ``ended``
    (no agent of the submission is left). ``position`` in the queue counts from 1; None if the engine does not
    report it. ``reason`` is the engine's text: why the submission waits, or why it ended.
    """

    word: str = RUNNING
    position: int | None = None
    reason: str = ""
    gpus: tuple[str, ...] = ()
    """The UUIDs of the GPUs of this machine that a job got which had to wait for them, in order of rank."""
    again: bool = False
    """Ended: whether the engine took the nodes, and may give others to another submission. It was nobody's purpose."""


class Submission(Protocol):
    """One attempt of a job, submitted to an engine. No method may block the driver for long."""

    @property
    def token(self) -> dict[str, Any]:
        """What ``attach`` needs in another process, as JSON: Slurm's job id, Ray's submission id. Empty for none."""

    @property
    def hosts(self) -> Sequence[str]:
        """The names of the plan's nodes, in its order; empty while they are not known, or as the plan has them."""

    def connect(self, node: NodePlan) -> Channel:
        """A new channel to the node's agent. Not called while the state is ``queued``.

        Raises ``ChannelError`` or ``LaunchError`` when the agent cannot be reached. The driver tries again for half a
        minute. Only a ``LaunchError`` at the very first try of a job fails the job at once, with its message.
        """

    def shared(self, node: NodePlan) -> bool:
        """Whether the node sees the driver's job directory on a local disk."""

    def state(self) -> EngineState:
        """The submission's state. Called about once a second. Raises ``LaunchError`` if the engine does not answer."""

    def cancel(self) -> None:
        """Cancel the submission: nothing of it runs afterwards or later. May be called twice, and after its end."""


class Launcher(Protocol):
    """An engine. Created without arguments, by the name of its entry point (``launchers/registry.py``).

    An engine with one submission for all nodes (Slurm, Ray, Spark, Kubernetes) has a queue and a token. An engine
    with one channel per node (this machine, SSH) is a ``ChannelPerNode``.
    """

    def probe(self, options: Options, environ: Mapping[str, str]) -> tuple[Inventory, ...]:
        """The inventories of the nodes, for a job with the variables ``environ``.

        There is one, or one for each of ``--hosts`` or of ``--nodes``. What only the engine decides is left open:
        names and addresses are empty, and GPUs are ``open_gpu``. Raises ``LaunchError`` when the engine cannot be
        reached, ``OptionError`` and ``ResourceError`` for what it cannot give.
        """

    def planned(self, plan: Plan, options: Options, inventories: Sequence[Inventory]) -> Plan:
        """The plan, made from ``inventories``, with its ``request``, which ``--plan`` shows.

        Raises ``LaunchError`` when the engine refuses it.
        """

    def submit(self, plan: Plan, attempt: int) -> Submission:
        """Request the nodes of ``plan``. Raises ``LaunchError`` when the engine refuses."""

    def attach(self, plan: Plan, token: Mapping[str, Any]) -> Submission:
        """The submission with that token, for a driver that takes up a job.

        ``token`` is empty when the first driver died before it wrote the token to the journal. The engine then
        searches for ``plan.job``. Raises ``LaunchError`` when there is no such submission.
        """


class ChannelPerNode:
    """An engine without a queue: it is its own submission, and always running. Subclasses implement ``connect``."""

    token: ClassVar[dict[str, Any]] = {}
    hosts: ClassVar[Sequence[str]] = ()
    lasts: ClassVar[bool] = False
    """Whether one submission serves all attempts of a job."""

    def planned(self, plan: Plan, options: Options, inventories: Sequence[Inventory]) -> Plan:
        return plan

    def submit(self, plan: Plan, attempt: int) -> Self:
        return self

    def attach(self, plan: Plan, token: Mapping[str, Any]) -> Self:
        return self

    def state(self) -> EngineState:
        return EngineState()

    def cancel(self) -> None:
        """Agents end their ranks themselves."""
