"""One agent a user and node: serves many drivers, starts and watches jobs, ships what they write.

It holds no state that its files do not hold: after its death the next one takes up every job from there.
What it is sent and answers is in ``AGENT_MESSAGES`` of ``launch/base.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import selectors
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..protocol import codec, inventory
from ..protocol.bundle import Manifest
from ..protocol.channel import Channel
from ..protocol.errors import ChannelError
from ..protocol.paths import JobPaths, make_private, safe_name, scratch_dir
from ..protocol.process import ProcessId, processes_of_job
from ..protocol.version import agent_directory
from . import warm
from .assignment import Assignment
from .nodejob import NodeJob, reap, replica
from .tail import Shipment

LINGER_SECONDS = 2.0
"""Without a driver and a job, the agent ends after so long."""

ORPHAN_SECONDS = 0.5
"""A job on the driver's own disk whose driver is gone gets a new one after so long."""

LEASH_SECONDS = 600.0
"""A job whose driver is on another machine goes on so long without it."""

SILENCE_SECONDS = 30.0
"""A driver that says nothing for so long (it pings every other second) is gone."""

FORK_DOUBT_SECONDS = 0.3
"""A launcher forked by a zygote that died then has written its first line by then."""

FAST_TICK, SLOW_TICK = 0.004, 0.02
"""Seconds between two looks at the event files: soon after a change, and else."""

PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Peer:
    """One driver's connection."""

    channel: Channel
    process: ProcessId | None = None
    job: str | None = None
    shipments: dict[str, Shipment] = field(default_factory=dict)
    heard: float = field(default_factory=time.monotonic)
    incoming: dict[str, Any] = field(default_factory=dict)
    stalled_told: bool = False


class Agent:
    """The loop: frames of drivers, frames of zygotes, the files of jobs, the clock."""

    def __init__(self, listener: socket.socket, directory: Path) -> None:
        self._listener = listener
        self._directory = directory
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._peers: list[Peer] = []
        self._jobs: dict[str, NodeJob] = {}
        self._shared: dict[str, bool] = {}
        self._orphaned: dict[str, float] = {}
        self._fresh: dict[int, subprocess.Popen[bytes]] = {}
        self._unforked: list[tuple[float, Assignment]] = []
        self._drivers: list[subprocess.Popen[bytes]] = []
        self._stop = False
        self._busy_until = 0.0
        self._idle_since = time.monotonic()
        self._pool = warm.WarmPool(
            directory / "zygote.log", self._register, self._unregister, self._on_forked, self._on_fork_failed
        )

    # -- the loop

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            while not self._done():
                now = time.monotonic()
                tick = FAST_TICK if now < self._busy_until else SLOW_TICK if self._active() else 0.5
                for key, mask in self._selector.select(tick):
                    key.data(mask)
                self._turn()
        finally:
            self._pool.close()

    def _on_stop(self, *_: object) -> None:
        self._stop = True

    def _active(self) -> bool:
        return any(job.state != "ended" for job in self._jobs.values()) or any(p.channel.pending for p in self._peers)

    def _done(self) -> bool:
        if self._stop and not self._active():
            return True
        if self._peers or self._active():
            self._idle_since = time.monotonic()
        return time.monotonic() - self._idle_since > LINGER_SECONDS

    def _turn(self) -> None:
        now = time.monotonic()
        self._reap()
        for name, job in list(self._jobs.items()):
            if job.poll(now):
                self._busy_until = now + 0.5
            self._ship(name, job, now)
        self._drop_silent(now)
        self._care_for_orphans(now)
        self._start_unforked(now)
        self._pool.retire(now)

    def _reap(self) -> None:
        for process in [*self._fresh.values(), *self._drivers, *(z.process for z in self._pool.zygotes.values())]:
            process.poll()
        self._drivers = [process for process in self._drivers if process.returncode is None]
        self._fresh = {pid: process for pid, process in self._fresh.items() if process.returncode is None}
        known = {z.process.pid for z in self._pool.zygotes.values()} | set(self._fresh) | {d.pid for d in self._drivers}
        if known:
            _reap_orphans(known)
        else:
            reap()

    # -- connections

    def _register(self, channel: Channel, on_readable: Callable[[], None]) -> None:
        self._selector.register(channel.read_fd, selectors.EVENT_READ, lambda mask: on_readable())

    def _unregister(self, channel: Channel) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel.read_fd)

    def _accept(self, mask: int) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if _peer_uid(connection) != os.getuid():
            connection.close()
            return
        fd = connection.detach()
        peer = Peer(Channel(fd, fd))
        self._peers.append(peer)
        self._register(peer.channel, lambda: self._on_readable(peer))

    def _on_readable(self, peer: Peer) -> None:
        try:
            for message, body in peer.channel.receive():
                peer.heard = time.monotonic()
                self._on_message(peer, message, body)
        except (EOFError, ChannelError):
            self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        self._unregister(peer.channel)
        peer.channel.close()

    def _drop_silent(self, now: float) -> None:
        for peer in list(self._peers):
            try:
                peer.channel.flush()
            except ChannelError:
                self._drop(peer)
                continue
            if now - peer.heard > SILENCE_SECONDS and peer.job is not None:
                self._drop(peer)

    # -- messages

    def _on_message(self, peer: Peer, message: dict[str, Any], body: bytes) -> None:
        handler = getattr(self, f"_on_{message['type']}", None)
        if handler is None:
            raise ChannelError(f"an unknown message {message['type']!r}")
        handler(peer, message, body)

    def _on_hello(self, peer: Peer, message: dict[str, Any], body: bytes) -> None:
        peer.process = ProcessId.from_json(message["process"])
        peer.channel.send(
            {
                "type": "welcome",
                "process": ProcessId.mine().to_json(),
                "inventory": inventory.local_inventory().to_json(),
                "warm": self._pool.describe(),
                "jobs": [name for name, job in self._jobs.items() if job.state != "ended"],
            }
        )

    def _on_warm(self, peer: Peer, message: dict[str, Any], body: bytes) -> None:
        self._pool.warm(message["python"], message["environ"])

    def _on_ping(self, peer: Peer, message: dict[str, Any], body: bytes) -> None:
        peer.channel.send({"type": "pong", "t": message.get("t")})

    def _on_stop_warm(self, peer: Peer, message: dict[str, Any], body: bytes) -> None:
        self._pool.close()
        self._stop = True

    def _on_prepare(self, peer: Peer, message: dict[str, Any], body: bytes) -> None:
        """A node without the driver's disk: take the job's files, say which blobs are missing."""
        paths = replica(scratch_dir(), safe_name(message["job"]))
        blobs = make_private(scratch_dir() / "blobs")
        for name, text in message["files"].items():
            _write(paths.root / safe_name(name), text.encode("utf-8"))
        missing = [digest for digest in message["blobs"] if not (blobs / safe_name(digest)).exists()]
        peer.channel.send({"type": "missing", "job": message["job"], "blobs": missing})

    def _on_blob(self, peer: Peer, message: dict[str, Any], body: bytes) -> None:
        digest = safe_name(message["digest"])
        part = scratch_dir() / "blobs" / f".{digest}.{os.getpid()}"
        if message["offset"] == 0:
            peer.incoming[digest] = hashlib.sha256()
            part.unlink(missing_ok=True)
        peer.incoming[digest].update(body)
        with open(part, "ab", opener=_private) as file:
            file.write(body)
        if message["last"]:
            right = peer.incoming.pop(digest).hexdigest() == digest
            if right:
                part.rename(part.parent / digest)
            else:
                part.unlink()
            peer.channel.send({"type": "stored", "digest": digest, "right": right})

    def _on_start(self, peer: Peer, message: dict[str, Any], body: bytes) -> None:
        shared = bool(message["shared"])
        name = str(message["assignment"]["plan"]["job"])
        if not shared:
            root = replica(scratch_dir(), safe_name(name)).root
            blobs = scratch_dir() / "blobs"
            _trust_replicas(JobPaths(root), blobs)
            message["assignment"].update(job_root=str(root), blobs=str(blobs))
        assignment = Assignment.from_json(message["assignment"])
        old = self._jobs.pop(name, None)
        if old is not None:
            old.close()
        job = NodeJob(assignment.job_paths, assignment.node, assignment.node_plan().ranks, assignment.attempt)
        job.events.write("node.up", agent=ProcessId.mine().to_json())
        self._jobs[name] = job
        self._follow(peer, job, shared, message.get("offsets", {}))
        self._busy_until = time.monotonic() + 2.0
        if assignment.fresh:
            self._start_fresh(assignment)
        else:
            self._pool.launch(assignment)

    def _start_fresh(self, assignment: Assignment) -> None:
        process = warm.start_fresh(assignment, assignment.node_paths.launcher_log)
        self._fresh[process.pid] = process
        self._jobs[assignment.job].launcher = ProcessId.of(process.pid)

    def _on_forked(self, job: str, pid: int, ticks: int) -> None:
        mine = ProcessId.mine()
        if job in self._jobs:
            self._jobs[job].launcher = ProcessId(mine.host, mine.boot, mine.namespace, pid, ticks)
            if ticks == 0:  # it is gone already; poll() finds no process and ends the job
                self._busy_until = time.monotonic() + 1.0

    def _on_fork_failed(self, assignment: Assignment) -> None:
        """The zygote is gone; whether it had forked already is known only once a launcher could have said so."""
        self._unforked.append((time.monotonic() + FORK_DOUBT_SECONDS, assignment))

    def _start_unforked(self, now: float) -> None:
        """A new interpreter for each job whose zygote died before it forked."""
        for due, assignment in [item for item in self._unforked if item[0] <= now]:
            self._unforked.remove((due, assignment))
            job = self._jobs.get(assignment.job)
            if job is not None and job.state == "starting" and not processes_of_job(assignment.token):
                job.events.write("job.note", text="the warm process was lost; the ranks start in new interpreters")
                self._start_fresh(Assignment.from_json({**assignment.to_json(), "fresh": True}))

    def _on_follow(self, peer: Peer, message: dict[str, Any], body: bytes) -> None:
        """A driver takes up a job: this agent's own, or one that an earlier agent left."""
        name = safe_name(message["job"])
        shared = bool(message["shared"])
        job = self._jobs.get(name)
        if job is None:
            paths = JobPaths(Path(message["job_root"])) if shared else replica(scratch_dir(), name)
            job = NodeJob(paths, safe_name(message["node"]), tuple(message["ranks"]), message["attempt"], adopt=True)
            self._jobs[name] = job
            job.poll(time.monotonic())
            if job.launcher is None:
                job.end(0.0, time.monotonic())
        self._follow(peer, job, shared, message["offsets"])

    def _follow(self, peer: Peer, job: NodeJob, shared: bool, offsets: dict[str, int]) -> None:
        peer.job = job.paths.job
        self._shared[job.paths.job] = shared
        self._orphaned.pop(job.paths.job, None)
        peer.shipments[job.paths.job] = Shipment(peer.channel, job.paths, job.node, shared, dict(offsets))

    def _on_signal(self, peer: Peer, message: dict[str, Any], body: bytes) -> None:
        if job := self._jobs.get(message["job"]):
            job.signal(int(message["signal"]))
            self._busy_until = time.monotonic() + 1.0

    def _on_stacks(self, peer: Peer, message: dict[str, Any], body: bytes) -> None:
        if job := self._jobs.get(message["job"]):
            job.dump_stacks()

    def _on_end(self, peer: Peer, message: dict[str, Any], body: bytes) -> None:
        if job := self._jobs.get(message["job"]):
            job.end(float(message["grace"]), time.monotonic())
            self._busy_until = time.monotonic() + 1.0

    def _on_forget(self, peer: Peer, message: dict[str, Any], body: bytes) -> None:
        """The driver has everything of a job that has ended."""
        job = self._jobs.get(message["job"])
        if job is not None and job.state == "ended":
            del self._jobs[message["job"]]
            job.close(remove=not self._shared.pop(message["job"], True))
        peer.shipments.pop(message["job"], None)
        peer.job = None

    # -- jobs

    def _ship(self, name: str, job: NodeJob, now: float) -> None:
        for peer in list(self._peers):
            shipment = peer.shipments.get(name)
            if shipment is None:
                continue
            try:
                complete = shipment.pump()
                if complete and job.state == "ended":
                    peer.channel.send({"type": "ended", "job": name, "attempt": job.attempt})
                    del peer.shipments[name]
                elif job.stalled(now) and not peer.stalled_told:
                    peer.stalled_told = True
                    peer.channel.send({"type": "stalled", "job": name, "attempt": job.attempt})
            except ChannelError:
                self._drop(peer)

    def _care_for_orphans(self, now: float) -> None:
        followed = {peer.job for peer in self._peers}
        for name, job in list(self._jobs.items()):
            if name in followed:
                self._orphaned.pop(name, None)
                continue
            since = self._orphaned.setdefault(name, now)
            if self._shared.get(name, True):
                if now - since > ORPHAN_SECONDS:
                    self._orphaned[name] = now + 2.0  # time for the new driver to come
                    self._revive_driver(job)
            elif job.state == "ended" or now - since > LEASH_SECONDS:
                job.end(1.0, now)
                if job.state == "ended" and now - since > LEASH_SECONDS:
                    del self._jobs[name]
                    job.close(remove=True)

    def _revive_driver(self, job: NodeJob) -> None:
        if job.paths.summary.exists() or not job.paths.spec.exists():
            job.end(0.0, time.monotonic())
            if job.state == "ended":
                del self._jobs[job.paths.job]
                job.close()
            return
        with open(self._directory / "driver.log", "ab") as log:
            self._drivers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "jupyter_torchdist.driver", "--attach", str(job.paths.root)],
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )


def _reap_orphans(known: set[int]) -> None:
    """Reap children that came to us as their subreaper, and leave ``Popen``'s own to ``Popen``."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = {int(pid) for pid in file.read().split()}
    except OSError:
        return
    for pid in children - known:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb", opener=_private) as file:
        file.write(data)


def _trust_replicas(paths: JobPaths, blobs: Path) -> None:
    """Blobs received here were hashed while they came: record them so, or every rank would hash them again."""
    manifest = Manifest.from_json(codec.loads(paths.manifest.read_bytes()))
    value = manifest.to_json()

    def record(blob: dict[str, Any]) -> None:
        status = (blobs / safe_name(blob["digest"])).stat()
        blob["record"] = [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]

    for blob in (value["stream"], value["linecache"], *value["buffers"], *(s["blob"] for s in value["sources"])):
        record(blob)
    _write(paths.manifest, codec.dumps(value).encode("ascii"))


def _peer_uid(connection: socket.socket) -> int:
    """User at the other end (unix(7), SO_PEERCRED)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[1])


def listen(directory: Path) -> socket.socket | None:
    """The agent's socket; None when another agent has it. Holds ``agent.lock`` for this process's life."""
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


def main() -> None:
    """Be this node's agent, unless there is one."""
    directory = agent_directory()
    listener = listen(directory)
    if listener is None:
        return
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    identity = directory / "agent.json"
    _write(identity, codec.dumps({"process": ProcessId.mine().to_json()}).encode("ascii"))
    try:
        Agent(listener, directory).run()
    finally:
        (directory / "agent.sock").unlink(missing_ok=True)
        identity.unlink(missing_ok=True)
