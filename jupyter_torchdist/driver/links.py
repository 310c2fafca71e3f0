"""One channel per node. A broken channel is opened again, with the offsets of the bytes already received."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..launchers.base import Submission
from ..protocol.assignment import Assignment
from ..protocol.errors import ChannelError, LaunchError, StoreError
from ..protocol.paths import JobPaths, safe_name
from ..protocol.plan import NodePlan, Plan
from ..protocol.process import ProcessId
from ..protocol.wire.channel import Channel
from ..protocol.wire.frames import CHUNK
from ..store.files import publish

PING_SECONDS = 2.0
SILENCE_SECONDS = 10.0
"""If an agent answers no ping for this time, the channel is opened again."""

LOST_SECONDS = 30.0
"""A node that could not be reached for this time is lost."""


ROOM = 4 * CHUNK
"""Bytes of blobs that may be queued in a channel, so that a large bundle does not fill the memory."""


def pieces(path: Path, digest: str) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The frames that transfer a blob."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        offset, last = 0, False
        while not last:
            data = file.read(CHUNK)
            last = not data or offset + len(data) >= size
            yield {"type": "blob", "digest": digest, "offset": offset, "last": last}, data
            offset += len(data)


class Link:
    """The driver's side of one node."""

    def __init__(self, submission: Submission, plan: Plan, node: NodePlan, paths: JobPaths, attempt: int) -> None:
        self._submission = submission
        self._plan = plan
        self.node = node
        self._paths = paths
        self.attempt = attempt
        self.shared = submission.shared(node)
        self.channel: Channel | None = None
        self.ended = False
        self.started = False
        """Whether this node was told to start, by this driver or an earlier one."""
        self._heard = 0.0
        self._pinged = 0.0
        self._down_since: float | None = None
        self._retry_at = 0.0
        self._after_prepare: Callable[[], None] | None = None
        self._blobs_wanted: set[str] = set()
        self._going: deque[Iterator[tuple[dict[str, Any], bytes]]] = deque()
        """Pieces of blobs that are not yet queued in the channel (see ``ROOM``)."""
        self._end: float | None = None
        self._order: Callable[[], None] | None = None
        """Sends the start order. Repeated on each new channel: the agent may be another one, which knows no job."""

    # -- connection

    def open(self, now: float) -> None:
        """Connect; follow a started job from the offsets received so far. Raises ``LaunchError``, ``ChannelError``."""
        self.channel = self._submission.connect(self.node)
        self._heard = self._pinged = now
        self.channel.send({"type": "hello", "process": ProcessId.mine().to_json()})
        if self.started and not self.ended:
            if self._order is not None:  # the agent follows a job that runs, and starts what a dead agent had not
                self._order()
            else:
                self._follow()
            if self._end is not None:
                self.channel.send({"type": "end", "job": self._plan.job, "grace": self._end})

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
            }
        )

    def _offsets(self) -> dict[str, int]:
        """Size of each of the node's files in the driver's job directory."""
        folders = [self._paths.node(self.node.name).root, self._paths.results]
        return {
            str(file.relative_to(self._paths.root)): file.stat().st_size
            for folder in folders
            if folder.is_dir()
            for file in folder.iterdir()
            if not file.name.startswith(".")
        }

    def keep(self, now: float) -> bool:
        """Ping the agent, drop a silent channel, reopen a dropped one. False once the node is lost."""
        if self.ended:
            return True
        if self.channel is not None:
            try:
                self.pump()
                if now - self._pinged > PING_SECONDS:
                    self._pinged = now
                    self.channel.send({"type": "ping", "t": now})
            except ChannelError:
                self.drop(now)
            if now - self._heard > SILENCE_SECONDS:
                self.drop(now)
        if self.channel is None:
            if self._down_since is not None and now - self._down_since > LOST_SECONDS:
                return False
            if now >= self._retry_at:
                self._retry_at = now + 0.2
                with contextlib.suppress(LaunchError, ChannelError, OSError):
                    self.open(now)
        return True

    def drop(self, now: float) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        self._going.clear()
        if self._down_since is None:
            self._down_since = now

    def receive(self, now: float) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Messages from the agent. A broken channel raises nothing; ``keep`` opens it again."""
        if self.channel is None:
            return
        try:
            messages = self.channel.receive()
        except (EOFError, ChannelError):
            self.drop(now)
            return
        self._heard = now
        self._down_since = None
        yield from messages

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        """Send if possible. Important messages are repeated when the channel is reopened."""
        if self.channel is not None:
            with contextlib.suppress(ChannelError):
                self.channel.send(header, body)

    # -- the job

    def start(self, assignment: Assignment, blobs: Path, digests: list[str]) -> None:
        """Start the node's part. A node that does not share this disk first gets the files and blobs it lacks."""
        self.started = True
        self._blob_directory = blobs
        self._order = lambda: self._prepare(assignment, digests)
        self._order()

    def _prepare(self, assignment: Assignment, digests: list[str]) -> None:
        def begin() -> None:
            self.send(
                {"type": "start", "assignment": assignment.to_json(), "shared": self.shared, "offsets": self._offsets()}
            )

        if self.shared:
            self.send({"type": "start", "assignment": assignment.to_json(), "shared": True, "offsets": {}})
            return
        self._after_prepare = begin
        names = [self._paths.spec, self._paths.plan, self._paths.manifest]
        self.send(
            {
                "type": "prepare",
                "job": self._plan.job,
                "files": {path.name: path.read_text(encoding="utf-8") for path in names},
                "blobs": digests,
            }
        )

    def on_missing(self, digests: Sequence[str]) -> None:
        self._blobs_wanted = set(digests)
        for digest in digests:
            self._send_blob(digest)
        self._begin_when_complete()

    def _send_blob(self, digest: str) -> None:
        self._going.append(pieces(self._blob_directory / safe_name(digest), digest))

    @property
    def writing(self) -> bool:
        """Whether bytes wait to be sent."""
        return self.channel is not None and bool(self.channel.pending or self._going)

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
            self._begin_when_complete()
        else:
            self._send_blob(digest)

    def _begin_when_complete(self) -> None:
        if not self._blobs_wanted and self._after_prepare is not None:
            begin, self._after_prepare = self._after_prepare, None
            begin()

    def on_bytes(self, name: str, offset: int, data: bytes) -> None:
        """Append new bytes of a node's file to the driver's copy. Raises ``OSError`` when the disk is full."""
        folder, _, file_name = name.rpartition("/")
        if folder not in (f"nodes/{self.node.name}", "results"):
            raise ChannelError(f"{self.node.name} sent a file outside its directory")
        path = self._paths.root / folder / safe_name(file_name)
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

    def on_whole(self, name: str, data: bytes) -> None:
        """Replace the node's gauges. Nothing depends on them: when the disk is full, the old gauges remain."""
        gauges = self._paths.node(self.node.name).gauges
        if name != f"nodes/{self.node.name}/{gauges.name}":
            raise ChannelError(f"{self.node.name} sent a file that is not replaced")
        with contextlib.suppress(StoreError):
            publish(gauges, data)

    def signal(self, number: int) -> None:
        self.send({"type": "signal", "job": self._plan.job, "signal": number})

    def end(self, grace: float) -> None:
        self._end = grace
        self.send({"type": "end", "job": self._plan.job, "grace": grace})

    def forget(self) -> None:
        self.send({"type": "forget", "job": self._plan.job})
