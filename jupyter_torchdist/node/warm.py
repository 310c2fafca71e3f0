"""The warm processes of a node: one zygote per interpreter and import-time environment."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..protocol import codec
from ..protocol.errors import ChannelError
from ..protocol.process import JOB_TOKEN, JOB_TOKEN_LENGTH, ProcessId, processes_of_job
from ..protocol.wire.assignment import Assignment
from ..protocol.wire.channel import Channel
from .assignment import import_environment

IDLE_SECONDS = 15 * 60
"""A zygote that forked nothing for this time is ended. The next job starts a new one."""

MOST = 4
"""Largest number of zygotes at a time: each uses the memory of ``import torch``."""

Key = tuple[str, tuple[tuple[str, str], ...]]


def key_of(python: str, environ: dict[str, str]) -> Key:
    """The values that must be equal for a zygote to serve a job."""
    return python, tuple(import_environment(environ).items())


@dataclass
class Zygote:
    """What the agent knows about one warm process."""

    process: subprocess.Popen[bytes]
    first: ProcessId
    """Leader of the session of this zygote and its successor. Launchers have left that session."""
    channel: Channel
    pid: int = 0
    """Pid of the process that serves now: the first process hands over to a fork that has imported more."""
    ready: bool = False
    used: float = field(default_factory=time.monotonic)
    waiting: list[Assignment] = field(default_factory=list)
    """Jobs that arrived before the zygote was ready."""
    asked: dict[str, Assignment] = field(default_factory=dict)
    """Jobs for which the zygote was asked to fork and has not yet confirmed it."""


def base_environment(environ: dict[str, str]) -> dict[str, str]:
    """The variables needed to start an interpreter. All other variables come with each job."""
    ours = ("TORCHDIST_HOME", "TORCHDIST_RUNTIME_DIR", "TORCHDIST_QUEUE", "TORCHDIST_SCRATCH", "TORCHDIST_SUCCESSORS")
    kept = {name: environ[name] for name in ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", *ours) if name in environ}
    return {
        **kept,
        **import_environment(environ),
        JOB_TOKEN: " " * JOB_TOKEN_LENGTH,
        # torch.cuda.is_available() in the parent of a fork must not initialise CUDA.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


class WarmPool:
    """Starts, uses and ends zygotes. Calls ``on_forked(job, pid, ticks)`` or ``on_failed(assignment)`` for each job."""

    def __init__(
        self,
        log: Path,
        register: Callable[[Channel, Callable[[], None]], None],
        unregister: Callable[[Channel], None],
        on_forked: Callable[[str, int, int], None],
        on_failed: Callable[[Assignment], None],
    ) -> None:
        self._log = log
        self._register = register
        self._unregister = unregister
        self._on_forked = on_forked
        self._on_failed = on_failed
        self.zygotes: dict[Key, Zygote] = {}
        self.unsafe: set[str] = set()
        """Libraries that started threads at import on this node. Later zygotes do not import them."""

    def warm(self, python: str, environ: dict[str, str]) -> Zygote:
        """The zygote for jobs with this interpreter and environment. Starts one if there is none."""
        key = key_of(python, environ)
        zygote = self.zygotes.get(key)
        if zygote is None:
            self._make_room()
            zygote = self.zygotes[key] = self._start(python, environ)
            self._register(zygote.channel, lambda: self._on_readable(key))
        return zygote

    def _make_room(self) -> None:
        """End the longest idle zygotes: else a notebook that changes these variables often would fill the memory."""
        idle = [(z.used, key) for key, z in self.zygotes.items() if not z.waiting and not z.asked]
        for _, key in sorted(idle)[: max(0, len(self.zygotes) - MOST + 1)]:
            self._drop(key)

    def launch(self, assignment: Assignment) -> None:
        """Request a forked launcher for ``assignment``. ``on_forked`` or ``on_failed`` is called later."""
        zygote = self.warm(assignment.world.python, assignment.world.environ)
        zygote.used = time.monotonic()
        if zygote.ready:
            self._ask(zygote, assignment)
        else:
            zygote.waiting.append(assignment)

    def _ask(self, zygote: Zygote, assignment: Assignment) -> None:
        zygote.asked[assignment.job] = assignment
        with contextlib.suppress(ChannelError):  # a dead zygote is noticed at end of file
            zygote.channel.send({"type": "fork", "assignment": assignment.to_json()})

    def _start(self, python: str, environ: dict[str, str]) -> Zygote:
        ours, theirs = socket.socketpair()
        with theirs, open(self._log, "ab") as log:
            process = subprocess.Popen(
                [python, "-m", "jupyter_torchdist.node", "zygote", str(theirs.fileno()), *sorted(self.unsafe)],
                env=base_environment(environ),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        fd = ours.detach()
        return Zygote(process, ProcessId.of(process.pid), Channel(fd, fd))

    def withdraw(self, job: str) -> bool:
        """Forget a job that waits for its zygote to be ready. False if no such job waits (already requested)."""
        for zygote in self.zygotes.values():
            for assignment in zygote.waiting:
                if assignment.job == job:
                    zygote.waiting.remove(assignment)
                    return True
        return False

    def flush(self) -> None:
        """Write the bytes that a zygote's socket did not accept at once."""
        for zygote in self.zygotes.values():
            if zygote.channel.pending:
                with contextlib.suppress(ChannelError):
                    zygote.channel.flush()

    def _on_readable(self, key: Key) -> None:
        zygote = self.zygotes.get(key)
        if zygote is None:  # dropped while an earlier message was handled
            return
        try:
            for message, _ in zygote.channel.receive():
                self._on_message(zygote, message)
        except (EOFError, ChannelError):
            self._drop(key)

    def _on_message(self, zygote: Zygote, message: dict[str, Any]) -> None:
        if "pid" in message and message["type"] in ("ready", "warm"):
            zygote.pid = message["pid"]
        if message["type"] == "ready":
            zygote.ready = True
            for assignment in zygote.waiting:
                self._ask(zygote, assignment)
            zygote.waiting.clear()
        elif message["type"] == "forked":
            if zygote.asked.pop(message["job"], None) is not None:
                self._on_forked(message["job"], message["pid"], message["ticks"])
        elif message["type"] == "unsafe":
            self.unsafe.add(message["library"])

    def _drop(self, key: Key) -> None:
        zygote = self.zygotes.pop(key)
        self._unregister(zygote.channel)
        zygote.channel.close()
        for process in processes_of_job("", [zygote.first]):  # a successor does not read its channel while it imports
            process.signal(signal.SIGTERM)
        for assignment in [*zygote.waiting, *zygote.asked.values()]:
            self._on_failed(assignment)

    def retire(self, now: float) -> None:
        """End zygotes that were idle for ``IDLE_SECONDS``."""
        for key, zygote in list(self.zygotes.items()):
            if now - zygote.used > IDLE_SECONDS and not zygote.waiting and not zygote.asked:
                self._drop(key)

    def close(self) -> None:
        """End all zygotes."""
        for key in list(self.zygotes):
            self._drop(key)

    def describe(self) -> list[dict[str, Any]]:
        return [
            {"python": python, "pid": zygote.pid or zygote.process.pid, "ready": zygote.ready}
            for (python, _), zygote in self.zygotes.items()
        ]


def start_fresh(assignment: Assignment, log: Path) -> subprocess.Popen[bytes]:
    """Start a launcher in a new interpreter. It reads its assignment from standard input, in memory, never on disk."""
    line = memoryview(codec.dumps(assignment.to_json()).encode("ascii") + b"\n")
    given = os.memfd_create("assignment")  # with a pipe the agent would wait until the interpreter reads
    try:
        while line:
            line = line[os.write(given, line) :]
        os.lseek(given, 0, os.SEEK_SET)
        with open(log, "ab") as output:
            return subprocess.Popen(
                [assignment.world.python, "-m", "jupyter_torchdist.node", "launcher"],
                env={**base_environment(assignment.world.environ), JOB_TOKEN: assignment.token},
                cwd="/",
                stdin=given,
                stdout=output,
                stderr=output,
            )
    finally:
        os.close(given)
