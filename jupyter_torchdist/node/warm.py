"""The warm processes of a node: one zygote for each interpreter and import-time environment."""

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
from ..protocol.assignment import Assignment
from ..protocol.channel import Channel
from ..protocol.errors import ChannelError
from ..protocol.process import JOB_TOKEN, JOB_TOKEN_LENGTH, ProcessId, processes_of_job
from .assignment import import_environment

IDLE_SECONDS = 15 * 60
"""A zygote that started nothing for so long ends; the next job starts one."""

MOST = 4
"""Zygotes at a time: each has the memory of ``import torch``."""

Key = tuple[str, tuple[tuple[str, str], ...]]


def key_of(python: str, environ: dict[str, str]) -> Key:
    """What must be equal for a warm process to serve a job."""
    return python, tuple(import_environment(environ).items())


@dataclass
class Zygote:
    """One warm process, as its agent sees it."""

    process: subprocess.Popen[bytes]
    first: ProcessId
    """Leader of the session that this one and its successor are in; launchers have left it."""
    channel: Channel
    pid: int = 0
    """Of the process that serves now: its first one hands over to a fork that has imported more."""
    ready: bool = False
    used: float = field(default_factory=time.monotonic)
    waiting: list[Assignment] = field(default_factory=list)
    """Jobs that came before it was ready."""
    asked: dict[str, Assignment] = field(default_factory=dict)
    """Jobs it was asked to fork for and has not confirmed."""


def base_environment(environ: dict[str, str]) -> dict[str, str]:
    """Enough to start an interpreter; everything else comes with each job."""
    ours = ("TORCHDIST_HOME", "TORCHDIST_RUNTIME_DIR", "TORCHDIST_SCRATCH", "TORCHDIST_SUCCESSORS")
    kept = {name: environ[name] for name in ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", *ours) if name in environ}
    return {
        **kept,
        **import_environment(environ),
        JOB_TOKEN: " " * JOB_TOKEN_LENGTH,
        # torch.cuda.is_available() in the parent of a fork must not initialise CUDA.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


class WarmPool:
    """Starts, asks and retires zygotes. ``on_forked(job, pid, ticks)`` and ``on_failed(assignment)`` tell of jobs."""

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
        """Libraries that start threads when they are imported, seen on this node: later zygotes leave them out."""

    def warm(self, python: str, environ: dict[str, str]) -> Zygote:
        """The zygote for such jobs, started if there is none."""
        key = key_of(python, environ)
        zygote = self.zygotes.get(key)
        if zygote is None:
            self._make_room()
            zygote = self.zygotes[key] = self._start(python, environ)
            self._register(zygote.channel, lambda: self._on_readable(key))
        return zygote

    def _make_room(self) -> None:
        """End the zygotes that were idle longest: a notebook that varies such variables would fill the memory."""
        idle = [(z.used, key) for key, z in self.zygotes.items() if not z.waiting and not z.asked]
        for _, key in sorted(idle)[: max(0, len(self.zygotes) - MOST + 1)]:
            self._drop(key)

    def launch(self, assignment: Assignment) -> None:
        """Have a launcher forked for ``assignment``; ``on_forked`` or ``on_failed`` follows."""
        zygote = self.warm(assignment.world.python, assignment.world.environ)
        zygote.used = time.monotonic()
        if zygote.ready:
            self._ask(zygote, assignment)
        else:
            zygote.waiting.append(assignment)

    def _ask(self, zygote: Zygote, assignment: Assignment) -> None:
        zygote.asked[assignment.job] = assignment
        with contextlib.suppress(ChannelError):  # its end is seen as end of file
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
        """Forget a job that waits for its zygote to be ready; False when it was asked for already."""
        for zygote in self.zygotes.values():
            for assignment in zygote.waiting:
                if assignment.job == job:
                    zygote.waiting.remove(assignment)
                    return True
        return False

    def flush(self) -> None:
        """Write what a zygote's socket did not take at once."""
        for zygote in self.zygotes.values():
            if zygote.channel.pending:
                with contextlib.suppress(ChannelError):
                    zygote.channel.flush()

    def _on_readable(self, key: Key) -> None:
        zygote = self.zygotes.get(key)
        if zygote is None:  # dropped by what was read just before
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
        for process in processes_of_job("", [zygote.first]):  # a successor hears nothing while it imports
            process.signal(signal.SIGTERM)
        for assignment in [*zygote.waiting, *zygote.asked.values()]:
            self._on_failed(assignment)

    def retire(self, now: float) -> None:
        """End the zygotes that were idle for long."""
        for key, zygote in list(self.zygotes.items()):
            if now - zygote.used > IDLE_SECONDS and not zygote.waiting and not zygote.asked:
                self._drop(key)

    def close(self) -> None:
        """End all of them."""
        for key in list(self.zygotes):
            self._drop(key)

    def describe(self) -> list[dict[str, Any]]:
        return [
            {"python": python, "pid": zygote.pid or zygote.process.pid, "ready": zygote.ready}
            for (python, _), zygote in self.zygotes.items()
        ]


def start_fresh(assignment: Assignment, log: Path) -> subprocess.Popen[bytes]:
    """A launcher in a new interpreter; its assignment is on its standard input, in memory, never on disk."""
    line = memoryview(codec.dumps(assignment.to_json()).encode("ascii") + b"\n")
    given = os.memfd_create("assignment")  # a pipe would make the agent wait for the interpreter to start
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
