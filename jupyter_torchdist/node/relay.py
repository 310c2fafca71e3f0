"""Connects standard input and output to this node's agent. Starts the agent if none runs.

The driver runs this at the other end of an SSH connection. First it tells the agent the environment of this login: the
ranks of jobs that come over this connection start from it. Then it copies bytes without decoding them.
"""

from __future__ import annotations

import os
import selectors
import sys

from ..protocol.machine import inventory
from ..protocol.paths import runtime_dir
from ..protocol.process import JOB_TOKEN
from ..protocol.wire import frames
from ..protocol.wire.connect import connect_agent

ENVIRON = "environ"
"""A file in the runtime directory: the environment of the process that an engine started here, as in ``/proc``."""

OF_ENGINES = ("SLURM", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
"""Beginnings of variables that an engine sets for what it starts on a node."""

ROOM = 4 * 1024 * 1024
"""Bytes that wait for the slower side. With more, the faster side is not read."""


class _Copy:
    """One direction. ``source`` and ``target`` are descriptors; ``waiting`` is read and not yet written."""

    def __init__(self, source: int, target: int, waiting: bytes = b"") -> None:
        self.source, self.target = source, target
        self.waiting = bytearray(waiting)

    def read(self) -> bool:
        """Read what is there. False at the end."""
        try:
            data = os.read(self.source, 1024 * 1024)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.waiting += data
        return bool(data)

    def write(self) -> bool:
        """Write what the target takes. False when it is gone."""
        try:
            while self.waiting:
                del self.waiting[: os.write(self.target, self.waiting)]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True


def main() -> None:
    """Copy in both directions until one side closes."""
    agent = connect_agent(sys.executable).detach()
    environ = {name: value for name, value in _environ().items() if name != JOB_TOKEN}
    here = {"python": sys.executable, "release": sys.version.split()[0], "path": sys.path}
    here["torch"] = inventory.installed("torch")
    login = frames.encode({"type": "login", "environ": environ, **here})
    copies = _Copy(0, agent, login), _Copy(agent, 1)
    for fd in (0, 1, agent):
        os.set_blocking(fd, False)
    with selectors.DefaultSelector() as selector:
        while all(copy.write() for copy in copies):
            _watch(selector, copies)
            ready = {key.fd for key, mask in selector.select() if mask & selectors.EVENT_READ}
            if not all(copy.read() for copy in copies if copy.source in ready):
                break
        for copy in copies:  # the last words of the side that closed
            copy.write()


def _environ() -> dict[str, str]:
    """Of this login. What an engine says of its node is that of the process that it started there for the job."""
    given = runtime_dir() / ENVIRON
    if not given.exists():
        return dict(os.environ)
    pairs = (item.partition("=") for item in os.fsdecode(given.read_bytes()).split("\0"))
    of_engine = {name: value for name, _, value in pairs if name.startswith(OF_ENGINES)}
    own = {name: value for name, value in os.environ.items() if not name.startswith(OF_ENGINES)}
    return own | of_engine


def _watch(selector: selectors.BaseSelector, copies: tuple[_Copy, ...]) -> None:
    wanted: dict[int, int] = {}
    for copy in copies:
        if len(copy.waiting) < ROOM:
            wanted[copy.source] = wanted.get(copy.source, 0) | selectors.EVENT_READ
        if copy.waiting:
            wanted[copy.target] = wanted.get(copy.target, 0) | selectors.EVENT_WRITE
    for key in list(selector.get_map().values()):
        if wanted.get(key.fd) != key.events:
            selector.unregister(key.fd)
    for fd, events in wanted.items():
        if fd not in selector.get_map():
            selector.register(fd, events)
