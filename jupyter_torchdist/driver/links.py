"""One channel per node. A broken channel is opened again, with the offsets of the bytes already received."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..launchers.base import Submission
from ..protocol.errors import ChannelError, LaunchError, StoreError
from ..protocol.events import ProfileRequest
from ..protocol.paths import JobPaths, safe_name
from ..protocol.plan import NodePlan, Plan, is_open
from ..protocol.process import ProcessId
from ..protocol.wire import messages
from ..protocol.wire.assignment import Assignment
from ..protocol.wire.channel import Channel
from ..store.files import publish
from ..views.wording import first_few
from .blobs import PIECE, pieces
from .clocks import NodeClock
from .crossing import Arriving, driving
from .syncing import source, synced

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

ROOM = 4 * PIECE
"""Bytes of blobs that may be queued in a channel: a ping waits behind them, at 8 Mbit/s for a second."""


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
        self._blob_directory = Path()
        self._digests: tuple[str, ...] | None = None
        """Blobs that the node's part needs; None for a driver that takes up the job."""
        self._blobs_wanted: set[str] = set()
        self.to_send: int | None = 0 if self.shared or started else None
        """Bytes of blobs that the node lacks; None before it has said so."""
        self._complete = False
        """Whether the node has all files and blobs."""
        self._going: deque[Iterator[tuple[dict[str, Any], bytes]]] = deque()
        """Pieces of blobs that are not yet queued in the channel (see ``ROOM``)."""
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
        elif not self.shared and self._digests is not None:
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
                "offsets": {} if self.shared else self._offsets(),
                "blobs": self._arriving.missing(),
                **driving(self._plan),
            }
        )
        self.introduce()

    def _offsets(self) -> dict[str, int]:
        """Size of each of the node's files in the driver's job directory."""
        folders = [self._paths.node(self.node.name).root, self._paths.results]
        sizes = {
            str(file.relative_to(self._paths.root)): file.stat().st_size
            for folder in folders
            if folder.is_dir()
            for file in folder.iterdir()
            if not file.name.startswith(".")
        }
        work = self._paths.work / self.node.called
        written = (file for file in work.rglob("*") if file.is_file())
        return sizes | {f"{work.parent.name}/{file.relative_to(work)}": file.stat().st_size for file in written}

    def keep(self, now: float) -> None:
        """Ping the agent, drop a silent channel, reopen a dropped one."""
        if self.ended:
            return
        if self.channel is not None:
            try:
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
        self._going.clear()
        self.why_down = why or self.why_down
        self.reached_since = None
        if self.down_since is None:
            self.down_since = now

    def news(self, now: float) -> str:
        """A sentence, once when a host is out of reach, when it is back, and if its clock is wrong; else empty."""
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

    def prepare(self, blobs: Path, digests: Sequence[str]) -> None:
        """Send what the node's part needs before its start, to a node that does not share this disk."""
        self._blob_directory, self._digests = blobs, tuple(digests)
        if not self.shared:
            self._send_files()

    @property
    def involved(self) -> bool:
        """Whether the node has anything of the job."""
        return self.started or (self._digests is not None and not self.shared)

    def _send_files(self) -> None:
        self._complete = False
        names = [self._paths.spec, self._paths.plan, self._paths.manifest]
        if not self._plan.fresh:
            self.send({"type": "warm"})
        self.send(
            {
                "type": "prepare",
                "job": self._plan.job,
                "files": {path.name: path.read_text(encoding="utf-8") for path in names},
                "blobs": list(self._digests or ()),
                "store": str(self._blob_directory),
                "attempt": self.attempt,
                **synced(self._plan),
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
        if self._assignment is not None and (self.shared or self._complete):
            self._ordered = True
            assignment = self._assignment.to_json()
            offsets = {} if self.shared else self._offsets()
            self.send({"type": "start", "assignment": assignment, "shared": self.shared, "offsets": offsets})
            self.introduce()

    def introduce(self, steward: messages.Steward | None = None) -> None:
        """Tell the node's agent where it hears the first node's, as soon as it knows the job."""
        self._steward = steward or self._steward
        if self._steward is not None and (self._ordered or self._following):
            self.send({"type": "steward", **self._steward.to_json()})

    def on_missing(self, digests: Sequence[str]) -> None:
        self._blobs_wanted = set(digests)
        self.to_send = sum(source(self._plan, self._blob_directory, digest).stat().st_size for digest in digests)
        for digest in digests:
            self._send_blob(digest)
        self._look_whether_complete()

    def _send_blob(self, digest: str) -> None:
        if self._end is None or self._ordered:
            self._going.append(pieces(source(self._plan, self._blob_directory, digest), digest))

    @property
    def writing(self) -> bool:
        """Whether bytes wait that the node takes."""
        return self.channel is not None and self.channel.answered and bool(self.channel.pending or self._going)

    def pump(self) -> None:
        """Send as much as possible without blocking. Raises ``ChannelError`` when the peer is gone."""
        if self.channel is None:
            return
        self.channel.flush()
        while self._going and self.channel.pending < ROOM:
            piece = next(self._going[0], None)
            if piece is None:
                self._going.popleft()
            else:
                self.channel.send(*piece)

    def on_stored(self, digest: str, right: bool) -> None:
        if right:
            self._blobs_wanted.discard(digest)
            self._look_whether_complete()
        else:
            self._send_blob(digest)

    def _look_whether_complete(self) -> None:
        if not self._blobs_wanted and not self._complete:
            self._complete, self.to_send = True, 0
            self._start_if_complete()

    def on_bytes(self, name: str, offset: int, data: bytes) -> None:
        """Append new bytes of a node's file to the driver's copy. Raises ``OSError`` when the disk is full."""
        path = self._arriving.path(name) or self._paths.root / self._place(name)
        if not self._paths.root.is_dir():  # deleted while the job runs: it is not made anew
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            view = memoryview(data)
            while view and os.fstat(fd).st_size >= offset:
                written = os.pwrite(fd, view, offset)
                view, offset = view[written:], offset + written
        finally:
            os.close(fd)
        self._arriving.look(path)

    def _place(self, name: str) -> Path:
        """Where a file of the node is here, below the job's directory. Raises ``ChannelError``."""
        folder, _, file_name = name.rpartition("/")
        if folder in (f"nodes/{self.node.name}", "results"):
            return Path(folder, safe_name(file_name))
        top, *parts = name.split("/")
        if top != self._paths.work.name or not parts or {"", ".", ".."} & set(parts) or "\0" in name:
            raise ChannelError(f"{self.node.name} sent a file outside its directory")
        return Path(top, self.node.called, *parts)

    def came(self) -> str:
        """A sentence on files that the cell wrote on the node and that are here now; empty if there are none."""
        if self.shared:
            return ""
        place = self._paths.work / self.node.called
        files = sorted(str(file.relative_to(place)) for file in place.rglob("*") if file.is_file())
        return f"files that the cell wrote on {self.node.called} are in {place}: {first_few(files)}" if files else ""

    def on_whole(self, name: str, data: bytes) -> None:
        """Replace the node's gauges. Nothing depends on them: when the disk is full, the old gauges remain."""
        gauges = self._paths.node(self.node.name).gauges
        if name != f"nodes/{self.node.name}/{gauges.name}":
            raise ChannelError(f"{self.node.name} sent a file that is not replaced")
        with contextlib.suppress(StoreError):
            publish(gauges, data)

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
            self._going.clear()
            self._blobs_wanted.clear()
            self._assignment = None
        self._send_end(grace)

    def _send_end(self, grace: float) -> None:
        self.send({"type": "end", "job": self._plan.job, "grace": grace, "attempt": self.attempt})

    def forget(self) -> None:
        self.send({"type": "forget", "job": self._plan.job})
