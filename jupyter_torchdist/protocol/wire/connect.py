"""Connects to this machine's agent, and starts it if there is none."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

from ..errors import LaunchError
from ..paths import make_private
from ..process import JOB_TOKEN
from ..version import agent_directory

_START_SECONDS = 20.0


def connect_agent(python: str) -> socket.socket:
    """A connection to the agent. If it must be started, ``python`` runs it. Raises ``LaunchError``."""
    directory = agent_directory()
    path = str(directory / "agent.sock")
    deadline = time.monotonic() + _START_SECONDS
    process: subprocess.Popen[bytes] | None = None
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
            if process is None or process.poll() is not None:
                process = _start(python, directory)
            time.sleep(0.005)


def _start(python: str, directory: Path) -> subprocess.Popen[bytes]:
    try:
        make_private(directory.parent)
        make_private(directory)
        log = os.open(directory / "agent.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LaunchError(
            f"{directory} cannot be used for this machine's agent: {error.strerror or error}",
            "set $TORCHDIST_RUNTIME_DIR to a directory of your own on a local disk",
        ) from error
    try:
        return subprocess.Popen(
            [python, "-m", "jupyter_torchdist.node", "agent", str(directory)],
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
