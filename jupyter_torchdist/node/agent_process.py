"""The agent's process: its socket, its lock file, its cleanup."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import stat
from pathlib import Path

from ..protocol import codec
from ..protocol.paths import make_private
from ..protocol.process import ProcessId
from .agent import Agent
from .shipping.replica import write_private

PR_SET_CHILD_SUBREAPER = 36


def listen(directory: Path) -> socket.socket | None:
    """The agent's listening socket; None when another agent runs. Locks ``agent.lock`` until this process exits."""
    make_private(directory)
    lock = os.open(directory / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    path = directory / "agent.sock"
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(64)
    listener.setblocking(False)
    return listener


def main(directory: Path) -> None:
    """Run the agent whose socket is in ``directory``, unless one runs already."""
    os.umask(0o077)  # only the owner reads logs; each launcher sets the notebook's umask
    listener = listen(directory)
    if listener is None:
        return
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    identity = directory / "agent.json"
    write_private(identity, codec.dumps({"process": ProcessId.mine().to_json()}).encode("ascii"))
    try:
        Agent(listener, directory).run()
    finally:
        (directory / "agent.sock").unlink(missing_ok=True)
        identity.unlink(missing_ok=True)
