"""Real ranks without driver and agent: a job directory made by hand, a warm process that forks the ranks."""

from __future__ import annotations

import json
import os
import pickle
import platform
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from jupyter_torchdist import marshal
from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.bundle import Blob, Manifest
from jupyter_torchdist.protocol.events import ErrorRecord, Event, parse_lines
from jupyter_torchdist.protocol.paths import JobPaths
from jupyter_torchdist.protocol.plan import NodePlan, Plan
from jupyter_torchdist.protocol.spec import JobSpec, Options
from jupyter_torchdist.protocol.strategy import StrategyPlan

NODE = "n0"


@dataclass
class RankJob:
    """One job of ``world`` ranks on this machine. ``run`` starts it and waits; the rest reads what it left."""

    warm: Warm
    root: Path
    source: str
    world: int = 2
    kind: str = "cell"
    names: dict[str, Any] = field(default_factory=dict)
    bound: tuple[str, ...] = ()
    out: tuple[str, ...] = ("auto",)
    collect: str = "rank0"
    argv: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    flags: int = 0
    label: str = "Cell In[12]"
    strategy: StrategyPlan = field(default_factory=StrategyPlan)
    fresh: bool = False
    """New interpreters instead of forks."""
    codes: dict[int, int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.paths = JobPaths(self.root / "jobs" / "job-1")
        self.blobs = self.root / "blobs"
        self.files = self.paths.node(NODE)

    def write(self) -> None:
        """The job directory, as client and driver leave it."""
        for directory in (self.files.root, self.paths.results, self.blobs):
            directory.mkdir(parents=True, exist_ok=True)
        spec = JobSpec("job-1", self.kind, self.source, self.label, 2, Options(), time.time(), self.argv)
        node = NodePlan(NODE, tuple(range(self.world)))
        plan = Plan(
            "job-1", self.world, "gloo", (node,), False, None, None, 5.0, self.collect, self.out, strategy=self.strategy
        )
        stream, lines = self._blob(pickle.dumps(self.names, 5)), self._blob(b"{}")
        manifest = Manifest(
            "job-1", platform.python_version(), stream, (), tuple(self.names), (), lines, (), self.flags, self.bound
        )
        for path, value in ((self.paths.spec, spec), (self.paths.plan, plan), (self.paths.manifest, manifest)):
            path.write_text(codec.dumps(value.to_json()))

    def _blob(self, data: bytes) -> Blob:
        digest = sha256(data).hexdigest()
        (self.blobs / digest).write_bytes(data)
        return Blob(digest, len(data))

    def start(self) -> RankJob:
        """Fork the ranks; ``wait`` waits for their end."""
        self.write()
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **self.env}
        self.warm.ask({"job": str(self.paths.root), "blobs": str(self.blobs), "world": self.world,
                       "fresh": self.fresh, "environ": environ})  # fmt: skip
        return self

    def wait(self) -> RankJob:
        """Wait for the end; ``codes`` are the ranks' exit codes."""
        result = self.paths.root / "codes.json"
        self.until(result.exists, timeout=110)
        self.codes = {int(rank): code for rank, code in json.loads(result.read_text()).items()}
        return self

    def run(self) -> RankJob:
        return self.start().wait()

    def events(self, rank: int) -> list[Event]:
        path = self.files.rank_events(rank)
        return parse_lines(path.read_bytes()).events if path.exists() else []

    def kinds(self, rank: int) -> list[str]:
        return [event.kind for event in self.events(rank)]

    def event(self, rank: int, kind: str) -> Event:
        found = [event for event in self.events(rank) if event.kind == kind]
        assert len(found) == 1, (kind, self.kinds(rank), self.err(rank))
        return found[0]

    def error(self, rank: int) -> ErrorRecord:
        return ErrorRecord.from_json(self.event(rank, "rank.failed").data["error"])

    def out_text(self, rank: int) -> str:
        return self.files.out(rank).read_text()

    def err(self, rank: int) -> str:
        return self.files.err(rank).read_text()

    def lines(self, path: Path) -> list[dict[str, Any]]:
        return [codec.loads(line) for line in path.read_bytes().splitlines()]

    def metrics(self, rank: int) -> list[dict[str, Any]]:
        return self.lines(self.files.metrics(rank))

    def display(self, rank: int) -> list[dict[str, Any]]:
        return self.lines(self.files.display(rank))

    def values(self, rank: int = 0) -> dict[str, Any]:
        """Those of the result, without modules: names that a cell imports come back, too."""
        found = marshal.load_results(self.paths, rank, {}, {"__name__": "__main__"})
        return {name: value for name, value in found.items() if not isinstance(value, types.ModuleType)}

    def until(self, condition: Callable[[], bool], timeout: float = 30) -> None:
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, [(self.kinds(rank), self.err(rank)) for rank in range(self.world)]
            time.sleep(0.005)

    def pid(self, rank: int) -> int:
        self.until(lambda: "rank.started" in self.kinds(rank))
        return int(self.event(rank, "rank.started").data["process"]["pid"])


class Warm:
    """A process with torch imported that forks the launcher of each job, as the zygote does."""

    def __enter__(self) -> Warm:
        words = [sys.executable, "-m", "tests.ranks"]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, text=True, start_new_session=True)
        return self

    def ask(self, job: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)

    def __exit__(self, *_: object) -> None:
        """Ranks that a failed test left are in the session too."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """Fork a launcher for each line on stdin."""
    import torch.distributed  # noqa: F401

    from jupyter_torchdist.ranks import worker  # noqa: F401

    for line in sys.stdin:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork() == 0:
            try:
                launch(**json.loads(line))
            finally:
                os._exit(0)


def launch(job: str, blobs: str, world: int, fresh: bool, environ: dict[str, str]) -> None:
    """Fork the ranks of a job, as torch elastic does, and write their exit codes."""
    import socket

    from torch._C._distributed_c10d import TCPStore

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1", port, None, True, wait_for_workers=False, multi_tenant=False, master_listen_fd=listener.detach()
    )
    shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0, "MASTER_PORT": port}
    os.environ.clear()
    os.environ.update(environ)
    os.environ.update({name: str(value) for name, value in shared.items()}, MASTER_ADDR="127.0.0.1")
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0", GLOO_SOCKET_IFNAME="lo")
    waits = {}
    for rank in range(world):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        waits[rank] = _fresh_rank(job, blobs) if fresh else _forked_rank(job, blobs)
    codes = {rank: wait() for rank, wait in waits.items()}
    aside = Path(job) / "codes.aside"
    aside.write_text(json.dumps(codes))
    aside.rename(Path(job) / "codes.json")
    del store


def _forked_rank(job: str, blobs: str) -> Callable[[], int | None]:
    import multiprocessing

    from jupyter_torchdist.ranks import worker

    process = multiprocessing.get_context("fork").Process(target=worker.main, args=(job, blobs, NODE))
    process.start()

    def wait() -> int | None:
        process.join()
        return process.exitcode

    return wait


def _fresh_rank(job: str, blobs: str) -> Callable[[], int | None]:
    words = [sys.executable, "-m", "jupyter_torchdist.ranks.worker", job, blobs, NODE]
    return subprocess.Popen(words, cwd="/").wait  # Python would find modules of the current directory first


if __name__ == "__main__":
    main()
