"""One channel per node. A broken channel is opened again, with the offsets of the bytes already received."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ..launchers.base import Submission
from ..protocol.errors import ChannelError, LaunchError
from ..protocol.events import ProfileRequest
from ..protocol.paths import JobPaths
from ..protocol.plan import NodePlan, Plan, is_open
from ..protocol.process import ProcessId
from ..protocol.typed import Record
from ..protocol.wire import messages
from ..protocol.wire.assignment import Assignment
from ..protocol.wire.channel import Channel
from .cargo import ROOM, Cargo
from .clocks import NodeClock
from .copies import Copies
from .crossing import Arriving, driving

PING_SECONDS, FAST_PING_SECONDS = 2.0, 0.25
"""Between two pings: as a rule, and while the node's clock is not known well."""

SILENCE_SECONDS = 5.0
"""If an agent answers no ping for this time, the channel is opened again."""

CONNECT_SECONDS = 60.0
"""How long a new channel may be silent: it may have to send our code first, and start the agent."""

LOST_SECONDS = 30.0
"""A node that could not be reached for this time is lost, if another node can be reached."""

TELL_SECONDS = 3.0
"""A host that cannot be reached for this time is reported."""

RETRY_SECONDS, SLOWEST_RETRY_SECONDS = 0.2, 5.0
"""Seconds between two tries to connect: at first, and at most."""


class Link:
    """The driver's side of one node."""

    def __init__(
        self, submission: Submission, plan: Plan, node: NodePlan, paths: JobPaths, attempt: int, *, started: bool
    ) -> None:
        """``started``: an earlier driver has started the node's part."""
        self.submission = submission
        self._plan = plan
        self.node = node
        self._paths = paths
        self.attempt = attempt
        self.shared = submission.shared(node)
        self.channel: Channel | None = None
        self.clock = NodeClock(None if self.shared else paths.clock(node.name))
        self.ended = False
        """Whether its part has ended. The link goes on: while the host answers, another one that is silent is gone."""
        self.given_up = False
        self.started = self._following = started
        """Whether this node was told to start, by this driver or an earlier one."""
        self.why_down = ""
        self.reached_since: float | None = None
        """Since when the agent answers this driver without an interruption that was noticed."""
        self._reached = False
        """Whether the agent has answered, to this driver."""
        self._heard = 0.0
        self._pinged = 0.0
        self._patience = CONNECT_SECONDS
        """How long the channel may be silent."""
        self.down_since: float | None = None
        self._told = False
        """Whether the user was told that the node is out of reach."""
        self._retry_at = 0.0
        self._retry_seconds = RETRY_SECONDS
        self._arriving = Arriving(paths, wanted=started and plan.driver > 1 and node == plan.nodes[0])
        self.copies = Copies(paths, node, self._arriving)
        self.cargo: Cargo | None = None
        """What the node needs before its start; None for a node that sees this disk, or whose part was started."""
        self._asked = False
        """Whether the node was asked over this channel what it lacks."""
        self._end: float | None = None
        self._assignment: Assignment | None = None
        """The start order. Repeated on each new channel: the agent may be another one, which knows no job."""
        self._ordered = False
        """Whether the start order was sent."""
        self._steward: messages.Steward | None = None
        """Where the node's agent hears the first node's."""

    # -- connection

    def open(self, now: float) -> None:
        """Connect; follow a started job from the offsets received so far. Raises ``LaunchError``, ``ChannelError``."""
        self.channel = self.submission.connect(self.node)
        self._heard, self._pinged = now, now - PING_SECONDS
        self._patience = CONNECT_SECONDS
        self.channel.send({"type": "hello", "process": ProcessId.mine().to_json()})
        if not self.ended:
            self._take_up()
            if self._end is not None:
                self._send_end(self._end)

    def _take_up(self) -> None:
        """Over a new channel: an agent follows a job that runs, and starts what a dead agent had not started."""
        if self._following:
            self._follow()
        elif self._end is not None and not self._ordered:
            return
        elif self.cargo is not None:
            self._send_files()
        else:
            self._start_if_complete()

    def _follow(self) -> None:
        self.send(
            {
                "type": "follow",
                "job": self._plan.job,
                "job_root": str(self._paths.root),
                "node": self.node.name,
                "ranks": list(self.node.ranks),
                "attempt": self.attempt,
                "shared": self.shared,
                "offsets": {} if self.shared else self.copies.offsets(),
                "blobs": self._arriving.missing(),
                **driving(self._plan),
            }
        )
        self.introduce()

    def keep(self, now: float) -> None:
        """Ping the agent, drop a silent channel, reopen a dropped one."""
        if self.given_up:
            return
        if self.channel is not None:
            try:
                if not self.ended:
                    self._send_files()
                self.pump()
                period = PING_SECONDS if self.clock.sure else FAST_PING_SECONDS
                if self.channel.answered and now - self._pinged >= period:
                    self._pinged = now
                    self.channel.send({"type": "ping", "t": now})
            except ChannelError:
                self.drop(now)
            if now - self._heard > self._patience:
                self.drop(now, f"no answer for {self._patience:g} s")
        if self.channel is None and now >= self._retry_at:
            self._retry_at = now + self._retry_seconds
            self._retry_seconds = min(SLOWEST_RETRY_SECONDS, 1.5 * self._retry_seconds)
            with contextlib.suppress(LaunchError, ChannelError, OSError):
                self.open(now)

    def drop(self, now: float, why: str = "") -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        self._asked = False
        if self.cargo:
            self.cargo.stop()
        self.why_down = why or self.why_down
        self.reached_since = None
        if self.down_since is None:
            self.down_since = now

    def news(self, now: float) -> str:
        """A sentence, once when a host is out of reach, when it is back, and if its clock is wrong; else empty."""
        if self.ended:
            return ""
        if self.down_since is None and self._told:
            self._told = False
            return f"{self.node.called} can be reached again"
        if self.shared or self._told or self.down_since is None or now - self.down_since <= TELL_SECONDS:
            return self.clock.news(self.node.called)
        self._told = True
        why = f" ({self.why_down})" if self.why_down else ""
        return f"{self.node.called} cannot be reached{why}; its ranks go on"

    def lost(self, now: float, others: Sequence[Link]) -> bool:
        """Whether the node is given up: for ``LOST_SECONDS`` another node has answered, and this one has not.

        If no node answers, this machine may be the one that is cut off. Then nothing is given up before the job is to
        end, unless the node is this machine.
        """
        if self.ended or self.down_since is None:
            return False
        starts = [self.down_since] if self.shared or self._end is not None else []
        starts += [max(self.down_since, other.reached_since) for other in others if other.reached_since is not None]
        return any(now - start > LOST_SECONDS for start in starts)

    def receive(self, now: float) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Messages from the agent. A broken channel raises nothing; ``keep`` opens it again."""
        if self.channel is None:
            return
        try:
            received = self.channel.receive()
        except (EOFError, ChannelError) as error:
            self.drop(now, str(error))
            return
        except LaunchError as error:
            if not self._reached and not self._following:
                raise
            self.drop(now, error.message)
            return
        self._heard = now
        if received:
            if self.reached_since is None:
                self.reached_since = now
            self._reached, self.down_since = True, None
            self._patience, self._retry_seconds = SILENCE_SECONDS, RETRY_SECONDS
        yield from received

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        """Send if possible. Important messages are repeated when the channel is reopened."""
        if self.channel is not None:
            with contextlib.suppress(ChannelError):
                self.channel.send(header, body)

    # -- the job

    def prepare(self, cargo: Cargo) -> None:
        """Send what the node's part needs before its start, to a node that does not share this disk."""
        if not self.shared:
            self.cargo = cargo
            self._send_files()

    @property
    def involved(self) -> bool:
        """Whether the node has anything of the job."""
        return self.started or self.cargo is not None

    def _send_files(self) -> None:
        """Ask the node what it lacks, once it is known what it needs. Raises ``LaunchError``."""
        unwanted = self._end is not None and not self._ordered
        if self._asked or self.cargo is None or self.channel is None or unwanted or self.cargo.getting:
            return
        self._asked = True
        names = [self._paths.spec, self._paths.plan, self._paths.manifest]
        if not self._plan.fresh and not self.cargo.wheels:
            self.send({"type": "warm"})
        self.send(
            {
                "type": "prepare",
                "job": self._plan.job,
                "files": {path.name: path.read_text(encoding="utf-8") for path in names},
                "attempt": self.attempt,
                **self.cargo.asked(),
                "gpus": [gpu for gpu in self.node.gpus if not is_open(gpu)],
                **driving(self._plan),
            }
        )

    def start(self, assignment: Assignment) -> None:
        """Start the node's part, as soon as the node has what it needs."""
        self.started = True
        self._assignment = assignment
        self._start_if_complete()

    def _start_if_complete(self) -> None:
        if self._assignment is not None and (self.cargo is None or self.cargo.complete):
            self._ordered = True
            order, plan = self._assignment.order(), self._assignment.plan.text
            offsets = {} if self.shared else self.copies.offsets()
            words = {"job": self._plan.job, "order": order, "shared": self.shared, "offsets": offsets}
            self.send({"type": "start", **words}, plan)
            self.introduce()

    def introduce(self, steward: messages.Steward | None = None) -> None:
        """Tell the node's agent where it hears the first node's, as soon as it knows the job."""
        self._steward = steward or self._steward
        if self._steward is not None and (self._ordered or self._following):
            self.send({"type": "steward", **self._steward.to_json()})

    def take(self, said: Record, body: bytes) -> None:
        """What concerns this node alone."""
        if isinstance(said, messages.Ping):
            self.clock.hear(said, time.monotonic(), time.time())
        elif isinstance(said, messages.Whole):
            self.copies.replace(said.file, body)
        elif self.cargo is not None and (self._end is None or self._ordered):
            if isinstance(said, messages.Missing):
                for order in self.cargo.lacks(said):
                    self.send(order)
            elif isinstance(said, messages.Fetched):
                self.cargo.fetched(said)
            elif isinstance(said, messages.Stored):
                self.cargo.stored(said.digest, said.right)
            elif isinstance(said, messages.Built):
                self.cargo.built()
            if self.cargo.building:
                self.send({"type": "build", "job": self._plan.job})
            else:
                self._start_if_complete()

    @property
    def came(self) -> str:
        """A sentence on files that the cell wrote on the node and that are here now; empty if there are none."""
        return "" if self.shared else self.copies.of_the_cell(self.node.called)

    @property
    def writing(self) -> bool:
        """Whether bytes wait that the node takes."""
        if self.channel is None or not self.channel.answered:
            return False
        return bool(self.channel.pending or (self.cargo is not None and self.cargo.going))

    def pump(self) -> None:
        """Send as much as possible without blocking. Raises ``ChannelError`` when the peer is gone."""
        if self.channel is None:
            return
        self.channel.flush()
        while self.cargo is not None and self.channel.pending < ROOM and (frame := self.cargo.frame()):
            self.channel.send(*frame)

    def signal(self, number: int) -> None:
        self.send({"type": "signal", "job": self._plan.job, "signal": number})

    def ask_places(self) -> None:
        """Have every rank say where it is, and dump its flight recorder."""
        self.send({"type": "stacks", "job": self._plan.job})

    def ask_profile(self, request: ProfileRequest) -> None:
        """Have every rank profile its next steps."""
        self.send({"type": "profile", "job": self._plan.job, "request": request.to_json()})

    def end(self, grace: float) -> None:
        """End the node's part. If it was not told to start, it is not told any more."""
        self._end = grace
        if not self._ordered:
            if self.cargo:
                self.cargo.end()
            self._assignment = None
        self._send_end(grace)

    def _send_end(self, grace: float) -> None:
        self.send({"type": "end", "job": self._plan.job, "grace": grace, "attempt": self.attempt})

    def forget(self) -> None:
        self.send({"type": "forget", "job": self._plan.job})
