"""The warm processes of this machine, asked through their agents' sockets; a pid or a name is never trusted."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ChannelError
from ..paths import runtime_dir
from ..process import ProcessId
from .channel import Channel

ANSWER_SECONDS = 5.0
STOP_SECONDS = 10.0


def running() -> list[dict[str, Any]]:
    """The welcome of each agent of this user: ``process``, ``inventory``, ``warm``, ``jobs``."""
    found = []
    for channel, welcome in _agents():
        channel.close()
        found.append(welcome)
    return found


def stop() -> list[dict[str, Any]]:
    """End all warm processes; an agent with jobs ends with its last job. Returns the welcome of each agent."""
    found = []
    for channel, welcome in _agents():
        channel.send({"type": "stop_warm"})
        found.append(welcome)
        channel.close()
    idle = [ProcessId.from_json(welcome["process"]) for welcome in found if not welcome["jobs"]]
    deadline = time.monotonic() + STOP_SECONDS
    while any(process.alive() for process in idle) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def warm_up(channel: Channel, python: str, environ: dict[str, str], seconds: float) -> dict[str, Any] | None:
    """Start a warm process. Returns its entry in the welcome once it is ready, or None after ``seconds``."""
    deadline = time.monotonic() + seconds
    channel.send({"type": "warm", "python": python, "environ": environ})
    while time.monotonic() < deadline:
        ready: dict[str, Any] | None = next((warm for warm in hello(channel)["warm"] if warm["ready"]), None)
        if ready:
            return ready
        time.sleep(0.1)
    return None


def hello(channel: Channel) -> dict[str, Any]:
    """An agent's welcome. Raises ``ChannelError``."""
    channel.send({"type": "hello", "process": ProcessId.mine().to_json()})
    deadline = time.monotonic() + ANSWER_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        if select.select([channel.read_fd], [], [], left)[0]:
            try:
                for message, _ in channel.receive():
                    if message.get("type") == "welcome":
                        return message
            except EOFError:
                break
    raise ChannelError("an agent does not answer", "`%dist doctor` checks this machine")


def _agents() -> Iterator[tuple[Channel, dict[str, Any]]]:
    """A channel to each agent that answers, including agents of other versions of this package."""
    for path in sorted(runtime_dir().glob("agent-*/agent.sock")):
        channel = _connect(path)
        if channel is not None:
            try:
                yield channel, hello(channel)
            except ChannelError:
                channel.close()


def _connect(path: Path) -> Channel | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except OSError:  # the agent has ended
        connection.close()
        return None
    fd = connection.detach()
    return Channel(fd, fd)
