"""A cell on three hosts over SSH, which are namespaces of this machine (``tests/cluster``): they share its cores."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jupyter_torchdist.protocol.process import stat_fields
from tests.benchmarks.launch import CELL, SCRIPT
from tests.benchmarks.logs import LINES, LOOP
from tests.benchmarks.report import Row, median
from tests.benchmarks.stage import STAMP, Ranks, Stage
from tests.cluster import node_python
from tests.cluster.cluster import Cluster
from tests.cluster.hosts import missing_programs, refused
from tests.cluster.resetting import end_masters
from tests.leaks import wait_until
from tests.notebook import Notebook
from tests.simulated import Job, Simulated

ROUNDS, WARM, PRINTED, REST = 5, 5, 3, 30.0
LARGE, SENT = 500_000_000, 5
"""Bytes that are sent to several hosts and to one, and how often, after a first time that starts the agents."""

PYTHON = str(node_python.PLACE / "bin/python")
PORT = 29517
WHOLE = f"""
[[line == f"rank {{rank}} step {{i:06d}} loss {{i * 0.001:.4f}}"
  for i, line in enumerate(td.last.logs(rank).splitlines())].count(True) == {LINES} for rank in range(6)]
"""


@dataclass(frozen=True)
class OnHosts(Ranks):
    hosts: tuple[str, ...] = ("node1", "node2", "node3")

    @property
    def line(self) -> str:
        return f"{super().line} --hosts {','.join(self.hosts)}"


SIX = OnHosts(6, "gloo")


def rows() -> Iterator[Row]:
    if why := refused() or ", ".join(missing_programs()):
        print(f"  no hosts on this machine: {why}", flush=True)
        return
    with Stage.open(SIX) as stage, bed(stage, len(SIX.hosts)) as cluster:
        yield from launches(stage, cluster)
        with stage.notebook() as notebook:
            yield from data(stage, cluster, notebook)
            yield from lines(stage, notebook)
            yield from rest(cluster)
    with Stage.open(SIX) as stage, bed(stage, 4) as cluster, stage.notebook() as notebook:
        yield from large(stage, cluster, notebook)
    yield from many()


@contextmanager
def bed(stage: Stage, hosts: int) -> Iterator[Cluster]:
    """Hosts that write their stamps where this machine reads them, and which the stage's notebooks find."""
    python = node_python.make(stage.root / "python")
    cluster = Cluster.up(stage.root / "cluster", hosts, python=python, shared=[stage.marks])
    stage.environ["PATH"] = f"{cluster.bin}:{os.environ['PATH']}"
    (stage.root / "torchdist.toml").write_text(f'[hosts]\npython = "{PYTHON}"\n')
    try:
        yield cluster
    finally:
        end_masters(cluster)
        cluster.down()


def launches(stage: Stage, cluster: Cluster) -> Iterator[Row]:
    warm, cold, bare = [], [], []
    for _ in range(ROUNDS + 1):
        with stage.notebook(load=False) as notebook:
            loaded = notebook.run("%load_ext jupyter_torchdist")
            cold.append(first(stage, notebook) - loaded.ended)
            time.sleep(2.0)  # what a first job leaves to do, such as a warm process for the next one
            for _ in range(WARM):
                sent = time.monotonic()
                warm.append(first(stage, notebook) - sent)
        end_masters(cluster)
        stage.end_warm()
        wait_until(lambda: not any(map(cluster.processes, cluster.nodes)), timeout=20)
        bare.append(torchrun(stage, cluster))
    yield Row(
        "hosts", "3 hosts over SSH, 2 ranks each, warm launch: cell start → first line on the last rank",
        median(warm[WARM:]), "s", 1 / 8, median(bare[1:]), "torchrun on each, started by ssh at once",
        samples=tuple(warm[WARM:]), yardsticks=tuple(bare[1:]), note=circumstances(),
    )  # fmt: skip
    yield Row(
        "hosts", "…in seconds (an aim)", median(warm[WARM:]), "s", 0.5, samples=tuple(warm[WARM:])
    )  # fmt: skip
    yield Row(
        "hosts", "…cold: a new notebook, no connection and no agent; our code is there", median(cold[1:]), "s", 0.7,
        median(bare[1:]), "torchrun on each, started by ssh at once", samples=tuple(cold[1:]),
        note=f"with our code to be sent, once, {cold[0]:.2f} s",
    )  # fmt: skip


def circumstances() -> str:
    return f"{time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.1f}; hosts, notebook and all ranks share the cores"


def first(stage: Stage, notebook: Notebook) -> float:
    """When the last rank was at its first line."""
    notebook.run(CELL.replace("RANKS", stage.ranks.line), timeout=120)
    return max(stage.stamps("first"))


def torchrun(stage: Stage, cluster: Cluster) -> float:
    """Seconds from ``ssh HOST torchrun …``, for all hosts at once, to the first line on the last rank."""
    for node in cluster.nodes:
        cluster.write(node, "/srv/bare.py", STAMP.format(marks=str(stage.marks)) + SCRIPT.replace("JOIN", SIX.joins))
    begun = time.monotonic()
    words = f"--nnodes={len(cluster.nodes)} --nproc-per-node={SIX.count // len(cluster.nodes)}"
    words += f" --master-addr={cluster.address('node1')} --master-port={PORT}"
    run = f"cd /srv && OMP_NUM_THREADS=1 {PYTHON} -m torch.distributed.run {words}"
    processes = [
        subprocess.Popen(
            [cluster.bin / "ssh", node, f"{run} --node-rank={number} bare.py"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for number, node in enumerate(cluster.nodes)
    ]  # fmt: skip
    for process in processes:
        process.wait()
    stamps = stage.stamps("first")
    assert len(stamps) == SIX.count
    return max(stamps) - begun


def data(stage: Stage, cluster: Cluster, notebook: Notebook) -> Iterator[Row]:
    def received() -> list[int]:
        path = "/sys/class/net/eth0/statistics/rx_bytes"
        return [int(cluster.run(node, "cat", path).stdout) for node in cluster.nodes]

    notebook.run("import numpy as np; held = np.random.default_rng(0).random(2**25)")
    cell = f"%%distribute {stage.ranks.line} --out none\nheld[-1]"
    sent = []
    for _ in range(2):
        before = received()
        notebook.run(cell, timeout=300)
        sent.append(max(now - then for now, then in zip(received(), before, strict=True)))
    notebook.run("held = None")
    yield Row(
        "hosts", "256 MB captured, unchanged, second launch: all that arrives at a host", sent[1] / 1e3, "kB", 100,
        note=f"the first launch sent {sent[0] / 1e6:.0f} MB to each host; what other hosts sent it is counted, too",
    )  # fmt: skip


def large(stage: Stage, cluster: Cluster, notebook: Notebook) -> Iterator[Row]:
    """New data each time, to all hosts and to one, whose cables carry 1 Gbit/s each.

    What was sent is deleted after each time: its memory is used again. A virtual machine gets memory that it has not
    touched yet page by page from its host, which takes longer than all the rest here.
    """
    for node in cluster.nodes:
        cluster.limit(node, 1000)
    took: dict[int, list[float]] = {len(cluster.nodes): [], 1: []}
    for turn in range(2 * (SENT + 1)):
        count = 1 if turn % 2 else len(cluster.nodes)
        notebook.run(f"import numpy as np; held = np.random.default_rng({turn + 1}).random({LARGE // 8})", timeout=60)
        begun = time.monotonic()
        ranks = OnHosts(count, "gloo", tuple(cluster.nodes[:count]))
        notebook.run(f"%%distribute {ranks.line} --out none\nheld[-1]", timeout=300)
        took[count].append(time.monotonic() - begun)
        for node in cluster.nodes:
            cluster.run(node, "find", "/tmp", "-size", "+100M", "-delete")
        subprocess.run(["find", str(stage.root), "-xdev", "-size", "+100M", "-delete"], check=True)
    notebook.run("held = None")
    cluster.heal()
    many, one = took[len(cluster.nodes)][1:], took[1][1:]
    yield Row(
        "hosts", "500 MB captured, new, to 4 hosts with 1 Gbit/s each: the whole cell", median(many), "s",
        1.3, median(one), "to one of them", samples=tuple(many), yardsticks=tuple(one),
    )  # fmt: skip


def lines(stage: Stage, notebook: Notebook) -> Iterator[Row]:
    late = []
    notebook.run("import jupyter_torchdist as td")
    for _ in range(PRINTED):
        cell = notebook.run(f"%%distribute {stage.ranks.line}" + LOOP, timeout=120)
        seen = [cell.seen(f"rank {rank} step {LINES - 1:06d}") or cell.ended for rank in range(stage.ranks.count)]
        late.append(max(seen) - max(stage.stamps("end")))
        assert all(notebook.value(WHOLE))
    yield Row(
        "hosts", "3 × 2 × 100,000 lines printed on hosts: all visible in the notebook after the last print",
        median(late), "s", 1.0, samples=tuple(late),
    )  # fmt: skip


def rest(cluster: Cluster) -> Iterator[Row]:
    """The notebook is open and no job runs."""
    found = [item for node in cluster.nodes for item in cluster.processes(node).items()]
    agents = [pid for pid, command in found if "jupyter_torchdist.node agent" in command]

    def used() -> list[float]:
        return [sum(map(int, stat_fields(pid)[11:13])) / os.sysconf("SC_CLK_TCK") for pid in agents]

    before = used()
    time.sleep(REST)
    share = max(now - then for now, then in zip(used(), before, strict=True)) / REST
    yield Row("hosts", "a host's agent at rest", 100 * share, "% of a core", 0.5)
    yield Row("hosts", "…its memory (RSS)", max(map(rss, agents)) / 2**20, "MB", 40)


def rss(pid: int) -> int:
    """In bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def many() -> Iterator[Row]:
    """Of simulated nodes, whose ranks need a third of a second for their first line, as those of the bed."""

    def launch(root: Path, nodes: int) -> float:
        directory = Path(tempfile.mkdtemp(dir=root))
        engine, job = Simulated(directory, seconds=0.3), Job(directory, nodes)
        begun = time.time()
        job.drive(engine)
        engine.close()
        events = [json.loads(line) for line in job.paths.journal.read_text().splitlines()]
        return float(next(event["t"] for event in events if event["kind"] == "job.running")) - begun

    time.sleep(6)  # ext4 creates files slowly for five seconds after many were deleted; nothing is deleted in between
    with tempfile.TemporaryDirectory() as root:
        pairs = [(launch(Path(root), 128), launch(Path(root), 8)) for _ in range(ROUNDS + 1)][1:]
    large, small = zip(*pairs, strict=True)
    yield Row(
        "hosts", "128 simulated nodes, 2 ranks each: order to start → all ranks run", median(large), "s", 2,
        median(small), "8 such nodes", samples=large, yardsticks=small,
    )  # fmt: skip
