"""The actor on each node. Its class is sent by value, with that of ``held.py``."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from typing import IO, Any

from ..held import Held

PIECE = 1024 * 1024
"""Bytes of one answer, at most."""

POLL_SECONDS = 2.0
"""How long a question for bytes waits for them."""

SILENCE_SECONDS = 30.0
"""A connection for whose bytes nobody asks for this time is closed."""

IDLE_SECONDS = 300.0
"""Without a connection and an agent for this time, the placement group is removed: nobody will come."""


@dataclass
class Connection:
    """A shell of the node, and what it says of errors."""

    process: asyncio.subprocess.Process
    words: IO[bytes]
    asked: float = field(default_factory=time.monotonic)


class Node:
    """Starts shells, and carries their bytes. What they start ends with this actor (``hold.py``)."""

    def __init__(self, hold: str, name: str) -> None:
        """``hold``: the text of ``hold.py``. ``name``: of this actor."""
        ray: Any = importlib.import_module("ray")
        self._ray = ray
        address = ray.util.get_node_ip_address()
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        if cluster := os.environ.get("RAY_ADDRESS"):
            own["RAY_ADDRESS"] = cluster
        self._held = Held(hold, f"ray-{name}", address, own)
        self._here = {"host": socket.gethostname(), "address": address}
        self._connections: dict[str, Connection] = {}
        self._watch: asyncio.Task[None] | None = None

    async def here(self) -> dict[str, str]:
        """``host`` and ``address`` of the node. The first question starts the watch."""
        self._watch = self._watch or asyncio.get_running_loop().create_task(self._watching())
        return self._here

    async def open(self, name: str, command: str) -> None:
        words = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the connection
        process = await asyncio.create_subprocess_exec(
            "sh",
            "-c",
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            limit=PIECE,
            cwd="/",
            env=self._held.environ,
            start_new_session=True,
        )
        self._connections[name] = Connection(process, words)

    async def write(self, name: str, data: bytes) -> None:
        """Returns when there is room for more."""
        pipe = self._connections[name].process.stdin
        assert pipe is not None
        with contextlib.suppress(ConnectionError):  # ``read`` tells the end
            pipe.write(data)
            await pipe.drain()

    async def read(self, name: str) -> bytes | None:
        """What has come, empty after ``POLL_SECONDS``; None at the end."""
        connection = self._connections[name]
        connection.asked = time.monotonic()
        assert connection.process.stdout is not None
        try:
            return await asyncio.wait_for(connection.process.stdout.read(PIECE), POLL_SECONDS) or None
        except asyncio.TimeoutError:
            return b""

    async def close(self, name: str) -> bytes:
        """Returns what the shell said of errors."""
        connection = self._connections.pop(name, None)
        if connection is None:
            return b""
        with contextlib.suppress(ProcessLookupError):
            connection.process.kill()
        await connection.process.wait()
        connection.words.seek(0)
        said = connection.words.read()
        connection.words.close()
        return said

    async def end(self) -> None:
        """End what was started here. Returns when nothing is left."""
        for name in list(self._connections):
            await self.close(name)
        await asyncio.get_running_loop().run_in_executor(None, self._held.end)

    async def _watching(self) -> None:
        used = time.monotonic()
        while time.monotonic() - used < IDLE_SECONDS:
            await asyncio.sleep(POLL_SECONDS)
            now = time.monotonic()
            for name, connection in list(self._connections.items()):
                if now - connection.asked > SILENCE_SECONDS:
                    await self.close(name)
            if self._connections or self._held.agents():
                used = now
        self._ray.util.remove_placement_group(self._ray.util.get_current_placement_group())
