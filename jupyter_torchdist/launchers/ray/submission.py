"""One attempt of a job in Ray: a placement group with an actor on each node, and the process that speaks with them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ...protocol.errors import ChannelError, LaunchError
from ...protocol.plan import NodePlan, Plan, Reach
from ...protocol.process import JOB_TOKEN
from ...protocol.wire.channel import Channel
from ..base import ENDED, QUEUED, EngineState
from ..booted import BootedChannel

CANCEL_SECONDS = 20.0
PACKET = 64 * 1024
CLIENT = "jupyter_torchdist.launchers.ray.client"
LOOK = "look with `ray list placement-groups` in a terminal"


def environ() -> dict[str, str]:
    """Of the process that imports Ray."""
    return {name: value for name, value in os.environ.items() if name != JOB_TOKEN}


class RayChannel(BootedChannel):
    """Frames over an actor."""

    remedy = "--host-option python=PATH names the Python of the nodes"

    def __init__(self, submission: RaySubmission, index: int, host: str, reach: Reach) -> None:
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
        return f"ssh {self.host}"


class RaySubmission:
    """``name``: of the placement group; empty if a driver died before it wrote it down."""

    def __init__(self, plan: Plan, name: str, order: Mapping[str, Any]) -> None:
        self._plan = plan
        self._name = name
        self._state = EngineState(QUEUED)
        self.hosts: Sequence[str] = ()
        self._cancelled: str | None = None
        """Why the cancel failed, or empty; None before the answer to it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._client = subprocess.Popen(
                [sys.executable, "-m", CLIENT],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=environ(),
                cwd="/",
                start_new_session=True,
            )
        self._socket = ours
        self._socket.setblocking(False)
        self.ask(address=plan.allocation, name=name, **order)

    @classmethod
    def submit(cls, plan: Plan, attempt: int) -> RaySubmission:
        return cls(plan, f"{group_name(plan)}.{attempt}", {"do": "submit", "request": json.loads(plan.request)})

    @classmethod
    def attach(cls, plan: Plan, token: Mapping[str, Any]) -> RaySubmission:
        return cls(plan, token.get("name", ""), {"do": "attach", "job": group_name(plan)})

    @property
    def token(self) -> dict[str, Any]:
        return {"name": self._name}

    def ask(self, *fds: int, **words: Any) -> None:
        """Raises ``LaunchError``: the process has ended."""
        try:
            socket.send_fds(self._socket, [json.dumps(words).encode()], fds)
        except OSError:
            raise LaunchError("the process that speaks with Ray has ended", LOOK) from None

    def state(self) -> EngineState:
        """The first answer comes with a later call: until then the job is queued."""
        self._hear()
        return self._state

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := self._packet():
                said = json.loads(data)
                if "cancelled" in said:
                    self._cancelled = said["error"]
                else:
                    self._state = EngineState(said["state"], reason=said["reason"])
                    self.hosts = said.get("hosts", self.hosts)
            if self._state.word != ENDED and self._cancelled is None:
                self._state = EngineState(ENDED, reason="the process that speaks with Ray has ended")

    def _packet(self) -> bytes:
        with contextlib.suppress(ConnectionError):
            return self._socket.recv(PACKET)
        return b""

    def connect(self, node: NodePlan) -> Channel:
        index = [one.name for one in self._plan.nodes].index(node.name)
        host = self.hosts[index] if self.hosts else node.called
        return RayChannel(self, index, host, node.reach)

    def shared(self, node: NodePlan) -> bool:
        """Which nodes share a disk with the driver is not known, so all goes through the channel."""
        return False

    def cancel(self) -> None:
        if self._client.poll() is not None:
            return
        error = self._cancel()
        self._socket.close()
        try:
            self._client.wait(1.0)
        except subprocess.TimeoutExpired:
            self._client.kill()
            self._client.wait()
        if error:
            raise LaunchError(error, LOOK)

    def _cancel(self) -> str:
        """Why it failed; empty if it did not."""
        with contextlib.suppress(LaunchError):
            self.ask(do="cancel")
        deadline = time.monotonic() + CANCEL_SECONDS
        while time.monotonic() < deadline and self._client.poll() is None:
            self._hear()
            if self._cancelled is not None:
                return self._cancelled
            time.sleep(0.02)
        return "Ray did not answer"


def group_name(plan: Plan) -> str:
    """Of the placement groups of a job, without the attempt."""
    return f"torchdist-{plan.job}"
