"""Connects to this machine's agent, and starts it if there is none."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import struct
import subprocess
import time
from pathlib import Path

from ..errors import LaunchError
from ..paths import make_private, runtime_dir
from ..process import JOB_TOKEN, check_ranks
from ..version import agent_directory
from .channel import Channel

_START_SECONDS = 20.0

HOLDER = "start"
"""A pipe in the runtime directory. Whatever reads it runs each line in the shell: a process that the engine started.

So the agent, and all that it starts, belong to the engine's job, and not to the connection that asked for the agent.
"""

_AGAIN_SECONDS = 5.0
"""When a process that the engine started has not started an agent in this time, it is asked again."""


def connect_agent(python: str) -> socket.socket:
    """A connection to the agent. If it must be started, ``python`` runs it. Raises ``LaunchError``."""
    check_ranks()
    directory = agent_directory()
    path = str(directory / "agent.sock")
    deadline = time.monotonic() + _START_SECONDS
    process: subprocess.Popen[bytes] | None = None
    again = 0.0
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_START_SECONDS)
        try:
            connection.connect(path)
            connection.settimeout(None)
            return connection
        except OSError as error:
            connection.close()
            broken = process is not None and (process.poll() or 0) > 0
            if broken or time.monotonic() > deadline:
                raise LaunchError(
                    f"this machine's agent does not answer on {path} ({error.strerror or error})",
                    f"its log is {directory / 'agent.log'}; $TORCHDIST_RUNTIME_DIR names another directory",
                ) from error
            # An agent that ended at once found the lock of another agent, which listens soon, or has ended, too.
            ended = process is not None and process.poll() is not None
            if ended or (process is None and time.monotonic() > again):
                process, again = _start(python, directory), time.monotonic() + _AGAIN_SECONDS
            time.sleep(0.005)


def _start(python: str, directory: Path) -> subprocess.Popen[bytes] | None:
    """None: the agent is not our child, because the engine must know it (see ``HOLDER``)."""
    try:
        make_private(directory.parent)
        make_private(directory)
        log = os.open(directory / "agent.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LaunchError(
            f"{directory} cannot be used for this machine's agent: {error.strerror or error}",
            "set $TORCHDIST_RUNTIME_DIR to a directory of your own on a local disk",
        ) from error
    command = [python, "-m", "jupyter_torchdist.node", "agent", str(directory)]
    try:
        if (holder := runtime_dir() / HOLDER).exists():
            path = f"PYTHONPATH={shlex.quote(os.environ.get('PYTHONPATH', ''))}"
            into = f"</dev/null >>{shlex.quote(str(directory / 'agent.log'))} 2>&1"
            _tell(holder, f"cd /; {path} exec {shlex.join(command)} {into}\n")
            return None
        return subprocess.Popen(
            command,
            cwd="/",
            # An agent started inside a rank must not end with the rank's job.
            env={name: value for name, value in os.environ.items() if name != JOB_TOKEN},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    finally:
        os.close(log)


def _tell(pipe: Path, line: str) -> None:
    """Raises ``LaunchError`` when nobody reads."""
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)
    except OSError as error:
        raise LaunchError(f"the engine's process at {pipe} does not answer ({error.strerror})") from error


class Door:
    """Lets in connections of this user at a listening socket."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def accept(self) -> Channel | None:
        """The next one; None for another user's, and at the limit of descriptors."""
        try:
            connection, _ = self.listener.accept()
        except OSError:
            self._turn_away()
            return None
        if peer_uid(connection) != os.getuid():
            connection.close()
            return None
        fd = connection.detach()
        return Channel(fd, fd)

    def _turn_away(self) -> None:
        """A peer that waits in the queue would wake this process for ever."""
        os.close(self._spare)
        with contextlib.suppress(OSError):
            self.listener.accept()[0].close()
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def peer_uid(connection: socket.socket) -> int:
    """User id of the process at the other end (unix(7), SO_PEERCRED)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[1])
