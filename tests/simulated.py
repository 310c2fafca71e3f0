"""Nodes without machines: each answers a driver as an agent does, so that a job of 128 nodes fits on two cores."""

from __future__ import annotations

import contextlib
import multiprocessing
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jupyter_torchdist.capture import capture_cell, pack
from jupyter_torchdist.client.world import world_here
from jupyter_torchdist.driver.run import Driver
from jupyter_torchdist.launchers.base import ChannelPerNode
from jupyter_torchdist.planning.topology import make_plan
from jupyter_torchdist.protocol.errors import ChannelError
from jupyter_torchdist.protocol.events import Event
from jupyter_torchdist.protocol.machine.inventory import local_inventory
from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.protocol.plan import Inventory, NodePlan
from jupyter_torchdist.protocol.process import ProcessId
from jupyter_torchdist.protocol.spec import JobSpec, Options
from jupyter_torchdist.protocol.state import JobState
from jupyter_torchdist.protocol.wire.channel import Channel
from jupyter_torchdist.store import journal
from jupyter_torchdist.store.blobs import BlobStore
from jupyter_torchdist.store.jobdir import create_job

PLACE = {"address": "10.0.0.1", "port": 29500}


@dataclass
class Node:
    """The agent's side of one connection."""

    name: str
    channel: Channel
    ranks: tuple[int, ...]
    job: str = ""
    started: bool = False
    begun: float | None = None
    """When it was told to start."""
    sizes: dict[str, int] = field(default_factory=dict)

    def events(self, file: str, *events: Event) -> None:
        self.ship(f"{file}.events", b"".join(event.to_line() for event in events))

    def ship(self, file: str, data: bytes) -> None:
        offset = self.sizes.get(file, 0)
        self.sizes[file] = offset + len(data)
        where = f"nodes/{self.name}/{file}"
        self.channel.send({"type": "bytes", "job": self.job, "file": where, "offset": offset}, data)


@dataclass
class Nodes:
    """All of them, in one process. ``seconds``: how long ranks take from their start to their first line.

    ``fails``: ranks that raise. ``runs``: whether ranks go on until they are told to end. ``dead``: a node that is
    silent once it was told to start, and answers no other connection.
    """

    listener: socket.socket
    log: Path
    seconds: float
    fails: frozenset[int]
    runs: bool
    dead: str
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    nodes: list[Node] = field(default_factory=list)
    died: bool = False

    def serve(self) -> None:
        self.selector.register(self.listener, selectors.EVENT_READ)
        while True:
            for key, _ in self.selector.select(0.005):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            now = time.monotonic()
            for node in [node for node in self.nodes if node.begun is not None and now > node.begun + self.seconds]:
                node.begun = None
                self._train(node)
            for node in list(self.nodes):
                with contextlib.suppress(ChannelError):
                    node.channel.flush()

    def _accept(self) -> None:
        fd = self.listener.accept()[0].detach()
        node = Node("", Channel(fd, fd), ())
        self.nodes.append(node)
        self.selector.register(fd, selectors.EVENT_READ, node)

    def _read(self, node: Node) -> None:
        try:
            for message, _ in node.channel.receive():
                self._answer(node, message)
        except (EOFError, ChannelError):
            self._drop(node)

    def _drop(self, node: Node) -> None:
        if node in self.nodes:
            self.selector.unregister(node.channel.read_fd)
            self.nodes.remove(node)
            node.channel.close()

    def _say(self, what: str, node: Node) -> None:
        with open(self.log, "a") as log:
            log.write(f"{what} {node.name} {time.monotonic()}\n")

    def _answer(self, node: Node, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "node":
            node.name, node.ranks = message["name"], tuple(message["ranks"])
            if self.died and node.name == self.dead:
                self._drop(node)
        elif kind == "hello":
            welcome = {"process": ProcessId.mine().to_json(), "inventory": {}, "warm": [], "jobs": []}
            node.channel.send({"type": "welcome", **welcome})
        elif kind == "ping":
            node.channel.send({"type": "pong", "t": message["t"], "clock": time.time()})
        elif kind == "prepare":
            node.channel.send({"type": "missing", "job": message["job"], "blobs": []})
        elif kind == "start":
            self._start(node, message["job"])
        elif kind == "end":
            self._say("end", node)
            self._end(node, -15)

    def _start(self, node: Node, job: str) -> None:
        self._say("start", node)
        node.job, node.started, node.begun = job, True, time.monotonic()
        if node.name == self.dead:
            self.died = True
            self._drop(node)
            return
        now, process = time.time(), ProcessId.mine().to_json()
        node.events("agent", Event("node.up", now, data={"agent": process, "restarts": 0}))
        node.events(
            "launcher",
            Event("launcher.started", now, data={"process": process, "attempt": 1, "restarts": 0}),
            *([Event("launcher.rendezvous", now, data=PLACE)] if node.name == "node0" else []),
        )

    def _train(self, node: Node) -> None:
        process = ProcessId.mine().to_json()
        for rank in node.ranks:
            now = time.time()
            begun = Event("rank.started", now, rank=rank, data={"process": process, "local_rank": 0, "restarts": 0})
            ready = Event("rank.ready", now, rank=rank)
            node.events(f"rank-{rank:05d}", begun, ready)
            node.ship(f"rank-{rank:05d}.out", f"line of rank {rank}\n".encode())
            if rank not in self.fails and not self.runs:
                node.events(f"rank-{rank:05d}", Event("rank.done", now, rank=rank))
        if self.fails & set(node.ranks):
            self._end(node, 1)
        elif not self.runs:
            self._end(node, 0)

    def _end(self, node: Node, code: int) -> None:
        if not node.started:
            node.channel.send({"type": "ended", "job": node.job, "attempt": 1})
            return
        node.started = False
        now = time.time()
        for rank in node.ranks:
            own = -15 if code == 1 and rank not in self.fails else code
            state = {0: "done", 1: "failed"}.get(own, "stopped")
            why = f"exit code {own}" if own else ""
            node.events("agent", Event("rank.exited", now, rank=rank, data={"code": own, "why": why, "state": state}))
        node.events("agent", Event("node.ended", now, data={"attempt": 1, "error": ""}))
        node.channel.send({"type": "ended", "job": node.job, "attempt": 1})


class Simulated(ChannelPerNode):
    """An engine with such nodes; the words are those of ``Nodes``."""

    def __init__(
        self, directory: Path, seconds: float = 0.0, fails: Iterable[int] = (), runs: bool = False, dead: str = ""
    ) -> None:
        self._place, self._log = str(directory / "nodes.sock"), directory / "nodes.log"
        self._log.touch()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._place)
            listener.listen(1024)
            nodes = Nodes(listener, self._log, seconds, frozenset(fails), runs, dead)
            self._process = multiprocessing.get_context("fork").Process(target=nodes.serve, daemon=True)
            self._process.start()

    def probe(self, options: Options, environ: Mapping[str, str]) -> tuple[Inventory, ...]:
        return (local_inventory(environ),)

    def shared(self, node: NodePlan) -> bool:
        return False

    def connect(self, node: NodePlan) -> Channel:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._place)
        fd = connection.detach()
        channel = Channel(fd, fd)
        channel.send({"type": "node", "name": node.name, "ranks": list(node.ranks)})
        return channel

    def told(self, what: str) -> dict[str, float]:
        """When each node was told to ``start`` or to ``end``, by the monotonic clock."""
        lines = [line.split() for line in self._log.read_text().splitlines()]
        return {name: float(at) for said, name, at in lines if said == what}

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()


class Job:
    """A job on so many simulated nodes, with two ranks each; its directory is below ``directory``."""

    def __init__(self, directory: Path, nodes: int, **options: Any) -> None:
        self.home, self.directory = Home(directory / "home"), directory
        self.home.blobs.mkdir(parents=True, exist_ok=True)
        name = f"simulated-{time.time_ns()}"
        spec = JobSpec(name, "cell", "1", "Cell In[1]", 2, Options(ranks=2 * nodes, **options), time.time())
        hosts = [
            replace(local_inventory(), host=f"host{n}", cores=8, slots=2, addresses=(f"10.0.{n // 250}.{n % 250 + 1}",))
            for n in range(nodes)
        ]
        plan = make_plan(spec, hosts)
        manifest = pack(capture_cell("1", "Cell In[1]", 2, {}, cwd=directory), name, BlobStore(self.home).put)
        self.paths, self.spec = create_job(self.home, spec, plan, manifest), spec

    def drive(self, engine: Simulated) -> JobState:
        """Run it to its end, in this thread."""
        world = world_here(self.spec.options, self.directory)
        Driver(self.paths, lambda name: engine, world, str(self.home.blobs)).run()
        return journal.state(self.paths)
