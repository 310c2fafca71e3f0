"""The task of a barrier stage, one on each node: it dials the application, and starts the shells that it asks for.

It is sent by value, with ``held.py``. The application calls ``receive`` for the other end. A line that nothing was
sent over yet is the node's sign of life; what follows a command on it is the shell's.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib
import ipaddress
import json
import os
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ..held import Held

POLL_SECONDS = 1.0
GREET_SECONDS = 10.0
"""How long each step of a greeting may take."""

DIAL_SECONDS = 30.0
"""How long an application that does not answer is dialled again."""

IDLE_SECONDS = 300.0
"""Without a shell and an agent for this time, the task ends: nobody will come."""

SPARKS = ("SPARK_", "PYSPARK_", "PYTHON_", "PYTHONHASHSEED", "PYTHONPATH", "PYTHONUNBUFFERED")
"""Beginnings of variables that are meant for Spark's worker, and not for ranks."""


def run(order: Mapping[str, Any], _: Iterator[Any]) -> Iterator[Any]:
    """``order``: ``address`` of the application, ``secret``, ``name`` of the application, ``hold``. Yields nothing."""
    context = importlib.import_module("pyspark").BarrierTaskContext.get()
    index = context.partitionId()
    executor = context.getTaskInfos()[index].address
    host = executor.rpartition(":")[0] or executor
    environ = {name: value for name, value in os.environ.items() if not name.startswith(SPARKS)}
    if gpus := context.resources().get("gpu"):
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.addresses)
    here = json.dumps({"index": index, "host": host}).encode()
    line = dial(order, here)
    name = f"{order['name']}.{index}"
    scratch = os.path.join(tempfile.gettempdir(), f"torchdist-scratch-{os.getuid()}", name)
    held = Held(order["hold"], name, address_of(host, line), environ, scratch=scratch)
    shells: list[subprocess.Popen[bytes]] = []
    try:
        used = time.monotonic()
        while time.monotonic() - used < IDLE_SECONDS:
            shells = [shell for shell in shells if shell.poll() is None]
            if shells or held.agents():
                used = time.monotonic()
            if not select.select([line], [], [], POLL_SECONDS)[0]:
                continue
            with line, contextlib.suppress(OSError):  # a line that breaks before its command is replaced
                command = sized(line)
                if not command:
                    break
                used = time.monotonic()
                shells.append(shell_of(command.decode(), line, held))
            line = dial(order, here)
    finally:
        line.close()
        for shell in shells:
            shell.kill()
            shell.wait()
        held.end()
    yield from ()


def shell_of(command: str, line: socket.socket, held: Held) -> subprocess.Popen[bytes]:
    """What it says of errors is in the log of the executor."""
    return subprocess.Popen(
        ["sh", "-c", command],
        stdin=line.fileno(),
        stdout=line.fileno(),
        cwd="/",
        env=held.environ,
        start_new_session=True,
    )


def address_of(host: str, line: socket.socket) -> str:
    """Of this node, for others: what its name at Spark means here. Where that is loopback: that of ``line``."""
    found = str(line.getsockname()[0])
    with contextlib.suppress(OSError):
        named = socket.gethostbyname(host)
        found = found if ipaddress.ip_address(named).is_loopback else named
    return found


# ---------------------------------------------------------------------------------------------------- the line


def dial(order: Mapping[str, Any], here: bytes) -> socket.socket:
    """A line to the application, which has proved to be it, and knows ``here``. Raises ``OSError``."""
    deadline = time.monotonic() + DIAL_SECONDS
    while True:
        try:
            line = socket.create_connection(tuple(order["address"]), GREET_SECONDS)
            try:
                greet(line, order["secret"], b"task", b"application")
                line.sendall(len(here).to_bytes(4, "big") + here)
            except BaseException:
                line.close()
                raise
            alive(line)
            return line
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)


def receive(line: socket.socket, secret: bytes) -> dict[str, Any]:
    """Who dials, at the application's end. Raises ``OSError`` for a caller without the secret."""
    line.settimeout(GREET_SECONDS)
    greet(line, secret, b"application", b"task")
    here: dict[str, Any] = json.loads(sized(line))
    alive(line)
    return here


def greet(line: socket.socket, secret: bytes, own: bytes, other: bytes) -> None:
    """Each end proves that it has the secret, which does not go over the line. Raises ``PermissionError``."""
    ours = os.urandom(32)
    line.sendall(ours)
    theirs = exactly(line, 32)
    line.sendall(hmac.digest(secret, own + ours + theirs, hashlib.sha256))
    if not hmac.compare_digest(exactly(line, 32), hmac.digest(secret, other + theirs + ours, hashlib.sha256)):
        raise PermissionError("the other end of the line does not have the job's secret")


def sized(line: socket.socket) -> bytes:
    return exactly(line, int.from_bytes(exactly(line, 4), "big"))


def exactly(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = line.recv(size - len(data))
        if not part:
            raise ConnectionError("the line ended")
        data += part
    return data


def alive(line: socket.socket) -> None:
    """From now on the line waits without limit, and ends when the other machine is silent for half a minute."""
    line.settimeout(None)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        line.setsockopt(socket.IPPROTO_TCP, option, value)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
