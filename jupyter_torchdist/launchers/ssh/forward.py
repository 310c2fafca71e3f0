"""A way to a host's agent that starts no process there: a local socket, forwarded over the connection that is kept.

A session of its own starts a shell and a Python on the host, and takes longer than the rest of a warm launch.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import subprocess

from ...protocol.plan import Reach
from ...protocol.wire.channel import Channel
from .connection import shared_connection

_SECONDS = 5.0
"""How long our own ssh, which holds the connection, may take to answer."""


class Forward:
    """``path`` leads to the socket ``remote`` of the host. Notebooks that share the connection share it, too."""

    def __init__(self, host: str, remote: str) -> None:
        self._control = shared_connection(host).path
        self._remote = remote
        name = hashlib.sha256(f"{host} {self._control} {remote}".encode()).hexdigest()[:12]
        self.path = shared_connection(host).directory / f"to-{name}"
        self._refused = not self._open()

    def ready(self) -> bool:
        """Whether there is such a socket. A host that forbids forwarding closes each connection through it."""
        if not self._refused and not self.path.exists():  # another notebook has closed it
            self._refused = not self._open()
        return not self._refused

    def _open(self) -> bool:
        for _ in range(2):  # a socket may be there of a connection that has ended
            if self._ask("forward") and self.path.exists():
                return True
            self.close()
        return False

    def close(self) -> None:
        """What goes through it lives on."""
        self._ask("cancel")
        self.path.unlink(missing_ok=True)

    def _ask(self, verb: str) -> bool:
        # Without the user's configuration: its own forwards would be asked for, too.
        words = ["ssh", "-F", "none", "-S", self._control, "-O", verb, "-L", f"{self.path}:{self._remote}", "host"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            return not subprocess.run(words, check=False, capture_output=True, timeout=_SECONDS).returncode
        return False


def forwarded(reach: Reach) -> Channel:
    """A channel to the agent. It ends at once where the host forbids forwarding. Raises ``OSError``."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect(reach.forward)
    except OSError:
        connection.close()
        raise
    fd = connection.detach()
    channel = Channel(fd, fd)
    channel.send({"type": "same_login", "login": reach.login})
    return channel
