"""The way to this machine's agent, which is started where there is none."""

from __future__ import annotations

import os
import socket
import subprocess
import time

from .errors import LaunchError
from .paths import make_private
from .version import agent_directory

_START_SECONDS = 20.0


def connect_agent(python: str) -> socket.socket:
    """A connection to the agent; ``python`` runs it if it must be started. Raises ``LaunchError``."""
    directory = agent_directory()
    path = str(directory / "agent.sock")
    deadline = time.monotonic() + _START_SECONDS
    process: subprocess.Popen[bytes] | None = None
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
            return connection
        except OSError as error:
            connection.close()
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"this machine's agent does not answer on {path} ({error.strerror or error})",
                    f"its log is {directory / 'agent.log'}; $TORCHDIST_RUNTIME_DIR names another directory",
                ) from error
            # One that ended at once found another agent's lock: that one will listen soon, or is gone too.
            if process is None or process.poll() is not None:
                process = _start(python)
            time.sleep(0.005)


def _start(python: str) -> subprocess.Popen[bytes]:
    directory = agent_directory()
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
            [python, "-m", "jupyter_torchdist.runtime", "agent"],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    finally:
        os.close(log)
