"""A submission through a process that speaks with the engine (``helper.py``): the driver's side."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..protocol.errors import ChannelError, LaunchError
from ..protocol.plan import NodePlan, Plan, Reach
from ..protocol.process import JOB_TOKEN
from ..protocol.wire.channel import Channel
from .base import ENDED, QUEUED, EngineState
from .booted import BootedChannel
from .packets import Packets

CANCEL_SECONDS = 20.0
SEND_SECONDS = 5.0


def environ() -> dict[str, str]:
    """Of a process that speaks with an engine."""
    return {name: value for name, value in os.environ.items() if name != JOB_TOKEN}


class HelpedChannel(BootedChannel):
    """Frames through the process."""

    remedy = "--host-option python=PATH names the Python of the nodes"

    def __init__(self, submission: HelpedSubmission, index: int, host: str, reach: Reach) -> None:
        self._submission, self._index = submission, index
        super().__init__(host, reach)

    def start(self, command: str, words: int) -> tuple[int, int]:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._submission.ask(theirs.fileno(), words, do="connect", node=self._index, command=command)
            except LaunchError as error:
                ours.close()
                raise ChannelError(error.message) from None
        end = ours.detach()
        return end, end

    @property
    def shell(self) -> str:
        return f"ssh {self.host.rpartition(' ')[2]}"


class HelpedSubmission:
    """``ends``: why it has ended when the process has. ``look``: where to look when the process does not answer."""

    engine: ClassVar[str]
    ends: ClassVar[str]
    look: ClassVar[str]
    channel: ClassVar[type[HelpedChannel]] = HelpedChannel

    def __init__(self, plan: Plan, driver: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        """``process``: None if another driver has started it."""
        self._plan = plan
        self._socket = driver
        self._socket.setblocking(False)
        self._packets = Packets(driver)
        self._process = process
        self._state = EngineState(QUEUED)
        self.hosts: Sequence[str] = ()
        self._gone = False
        self._cancelled: str | None = None
        """Why the cancel failed, or empty; None before the answer to it."""

    def ask(self, *fds: int, **words: Any) -> None:
        """Raises ``LaunchError``: the process has ended."""
        try:
            self._socket.settimeout(SEND_SECONDS)
            self._packets.send(words, fds)
            self._socket.setblocking(False)
        except OSError:
            raise LaunchError(self.ends, self.look) from None

    def state(self) -> EngineState:
        """The first answer comes with a later call: until then the job is queued."""
        self._hear()
        return self._state

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while (packet := self._packets.receive()) is not None:
                said, _ = packet
                if "cancelled" in said:
                    self._cancelled = said["error"]
                else:
                    self._state = EngineState(said["state"], reason=said["reason"], again=said.get("again", False))
                    self.hosts = said.get("hosts", self.hosts)
            self._gone = True
            if self._state.word != ENDED and self._cancelled is None:
                self._state = EngineState(ENDED, reason=self.ends)

    def connect(self, node: NodePlan) -> Channel:
        index = [one.name for one in self._plan.nodes].index(node.name)
        host = self.hosts[index] if self.hosts else node.called
        return self.channel(self, index, host, node.reach)

    def shared(self, node: NodePlan) -> bool:
        """Which nodes share a disk with the driver is not known, so all goes through the channel."""
        return False

    def cancel(self) -> None:
        if self._socket.fileno() < 0:
            return
        error = self._cancel()
        self._socket.close()
        if self._process is not None:
            try:
                self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if error:
            raise LaunchError(error, self.look)

    def _cancel(self) -> str:
        """Why it failed; empty if it did not, or the process had ended before."""
        self._hear()
        ended = self._state.word == ENDED
        if self._gone:
            return ""
        with contextlib.suppress(LaunchError):
            self.ask(do="cancel")
        deadline = time.monotonic() + CANCEL_SECONDS
        while time.monotonic() < deadline and not self._gone:
            self._hear()
            if self._cancelled is not None:
                return self._cancelled
            time.sleep(0.02)
        return "" if ended and self._gone else f"{self.engine} did not answer"


def start(module: str, theirs: socket.socket, more: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """The process. ``theirs`` is its standard input. ``more``: variables beside those of this process."""
    return subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=theirs.fileno(),
        stdout=subprocess.DEVNULL,
        env={**environ(), **(more or {})},
        cwd="/",
        start_new_session=True,
    )
