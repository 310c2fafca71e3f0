"""Two agents on this machine as two nodes: own process trees, directories and disks, joined only by their channels."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jupyter_torchdist.capture import capture_cell, pack
from jupyter_torchdist.client.world import world_here
from jupyter_torchdist.driver.run import Driver
from jupyter_torchdist.launchers.base import ChannelPerNode
from jupyter_torchdist.planning.topology import make_plan
from jupyter_torchdist.protocol.gauges import Gauges
from jupyter_torchdist.protocol.machine.inventory import local_inventory
from jupyter_torchdist.protocol.paths import Home, JobPaths
from jupyter_torchdist.protocol.plan import Inventory, NodePlan
from jupyter_torchdist.protocol.process import job_token, processes_of_job
from jupyter_torchdist.protocol.spec import JobSpec, Options
from jupyter_torchdist.protocol.state import JobState
from jupyter_torchdist.protocol.wire.channel import Channel
from jupyter_torchdist.store import gauges, journal
from jupyter_torchdist.store.blobs import BlobStore
from jupyter_torchdist.store.jobdir import create_job
from tests.leaks import wait_until


class TwoNodes(ChannelPerNode):
    """Reaches each node's agent through a relay, as SSH would; ``cut`` bytes after which a channel breaks."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.relays: list[subprocess.Popen[bytes]] = []
        self.cut: random.Random | None = None
        self.connections = 0

    def environment(self, node: str) -> dict[str, str]:
        root = self._directory / node
        return {**os.environ, "TORCHDIST_RUNTIME_DIR": str(root / "r"), "TORCHDIST_SCRATCH": str(root / "scratch")}

    def probe(self, options: Options, environ: Mapping[str, str]) -> tuple[Inventory, ...]:
        return (local_inventory(environ),)

    def connect(self, node: NodePlan) -> Channel:
        self.connections += 1
        relay = subprocess.Popen(
            [sys.executable, "-m", "jupyter_torchdist.node", "relay"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environment(node.name),
            start_new_session=True,
        )
        self.relays.append(relay)
        assert relay.stdin is not None and relay.stdout is not None
        read_fd, write_fd = os.dup(relay.stdout.fileno()), os.dup(relay.stdin.fileno())
        relay.stdin.close()
        relay.stdout.close()
        if self.cut is not None:
            return CutChannel(read_fd, write_fd, self.cut.randrange(200, 20_000))
        return Channel(read_fd, write_fd)

    def shared(self, node: NodePlan) -> bool:
        return False

    def close(self) -> None:
        for relay in self.relays:
            relay.kill()
            relay.wait()


class CutChannel(Channel):
    """Breaks, in the middle of whatever is on its way, once so many bytes have come."""

    def __init__(self, read_fd: int, write_fd: int, allowed: int) -> None:
        self._inner, cut_end = os.pipe()
        self._outer = read_fd
        super().__init__(self._inner, write_fd)
        self._pump = threading.Thread(target=self._copy, args=(read_fd, cut_end, allowed), daemon=True)
        self._pump.start()

    @staticmethod
    def _copy(source: int, target: int, allowed: int) -> None:
        try:
            while allowed > 0 and (data := os.read(source, min(allowed, 997))):
                allowed -= len(data)
                os.write(target, data)
        except OSError:
            pass
        finally:
            os.close(source)
            os.close(target)


@pytest.fixture(scope="module")
def disks() -> Iterator[Path]:
    """Two nodes' directories; their agents stay warm from test to test, and end by themselves."""
    directory = Path(tempfile.mkdtemp(prefix="td2n-", dir="/tmp"))
    yield directory
    ended = wait_until(lambda: not list(directory.glob("*/r/agent-*/agent.sock")))
    shutil.rmtree(directory)
    assert ended, "an agent is still there"


@pytest.fixture
def nodes(disks: Path) -> Iterator[TwoNodes]:
    connector = TwoNodes(disks)
    yield connector
    connector.close()


JOB = f"two-nodes-{os.getpid()}-{time.time_ns()}"
"""Processes are found by their job's name: two runs of this file at once must not find each other's."""


def drive(
    cell: str, connector: TwoNodes, directory: Path, *, names: dict[str, Any] | None = None, **options: Any
) -> JobPaths:
    home = Home(directory / "home")
    home.blobs.mkdir(parents=True, exist_ok=True)
    spec = JobSpec(JOB, "cell", cell, "Cell In[1]", 2, Options(ranks=4, **options), time.time())
    plan = make_plan(spec, [local_inventory()])
    plan = replace(plan, nodes=(NodePlan("node0", (0, 1)), NodePlan("node1", (2, 3))))
    capture = capture_cell(cell, "Cell In[1]", 2, names or {}, cwd=directory)
    manifest = pack(capture, JOB, BlobStore(home).put)
    paths = create_job(home, spec, plan, manifest)
    Driver(paths, lambda name: connector, world_here(spec.options, directory), str(home.blobs)).run()
    return paths


def state_of(paths: JobPaths) -> JobState:
    for node in ("node0", "node1"):
        assert processes_of_job(job_token(paths.job, node)) == []
    return journal.state(paths)


SUM = """
import torch, torch.distributed as dist, os
t = torch.ones(1) * dist.get_rank()
dist.all_reduce(t)
print("rank", dist.get_rank(), "local", os.environ["LOCAL_RANK"], "sum", t.item())
"""


def test_ranks_of_two_nodes_meet_and_their_files_come_here(nodes: TwoNodes, tmp_path: Path) -> None:
    paths = drive(SUM + "total = t.item()\n", nodes, tmp_path)
    assert state_of(paths).state == "succeeded"
    for rank in range(4):
        text = paths.node(f"node{rank // 2}").out(rank).read_text()
        assert text == f"rank {rank} local {rank % 2} sum 6.0\n"
    assert paths.result(0).exists()


def test_what_the_ranks_of_both_nodes_take_comes_here(nodes: TwoNodes, tmp_path: Path) -> None:
    paths, stop = JobPaths(tmp_path / "home" / "jobs" / JOB), tmp_path / "stop"
    seen: list[dict[int, Gauges]] = []

    def look() -> bool:
        seen.append(gauges.read(paths))
        return len(seen[-1]) == 4 and all(one.cpu is not None for one in seen[-1].values())

    def end() -> None:
        wait_until(look, 60.0)
        stop.touch()

    thread = threading.Thread(target=end)
    thread.start()
    wait = "import os, time\nwhile not os.path.exists(stop):\n    time.sleep(0.02)\n"
    drive(wait, nodes, tmp_path, names={"stop": str(stop)})
    thread.join()
    assert state_of(paths).state == "succeeded"
    assert seen[-1].keys() == {0, 1, 2, 3}
    for node in ("node0", "node1"):
        assert paths.node(node).gauges.read_bytes().startswith(b"{")
        assert not list(paths.node(node).root.glob("*.tmp"))
    assert all((one.memory_peak or 0) > 1_000_000 for one in gauges.read(paths).values())


def test_the_failing_rank_of_the_other_node_is_blamed(nodes: TwoNodes, tmp_path: Path) -> None:
    cell = SUM + "if dist.get_rank() == 3:\n    raise ValueError('on the second node')\ndist.barrier()\n"
    state = state_of(drive(cell, nodes, tmp_path))
    assert state.state == "failed"
    assert state.first_failure == 3
    error = state.ranks[3].error
    assert error is not None and error.title == "ValueError: on the second node"


def test_the_recorders_of_both_nodes_come_here(nodes: TwoNodes, tmp_path: Path) -> None:
    cell = """
import time, torch, torch.distributed as dist
from datetime import timedelta
soon = dist.new_group(timeout=timedelta(seconds=3))
if dist.get_rank() == 3:
    time.sleep(600)
dist.all_reduce(torch.ones(4), group=soon)
"""
    [found] = state_of(drive(cell, nodes, tmp_path)).findings
    assert (found.code, found.rank) == ("rank-stuck", 3)
    assert "(Cell In[1], line 8), in which ranks 0, 1 and 2 wait" in found.sentence


def test_captured_data_larger_than_a_channel_holds(nodes: TwoNodes, tmp_path: Path) -> None:
    data = np.arange(2_500_000)
    paths = drive("print(data.sum())", nodes, tmp_path, names={"data": data})
    assert state_of(paths).state == "succeeded"
    assert [paths.node(f"node{rank // 2}").out(rank).read_text() for rank in range(4)] == [f"{data.sum()}\n"] * 4


def test_a_cancel_reaches_both_nodes(nodes: TwoNodes, tmp_path: Path) -> None:
    paths = JobPaths(tmp_path / "home" / "jobs" / JOB)

    def cancel() -> None:
        while not paths.journal.exists() or journal.state(paths).state != "running":
            time.sleep(0.05)
        (paths.requests / ".x").write_text('{"kind":"interrupt"}')
        (paths.requests / ".x").rename(paths.requests / "x.json")

    thread = threading.Thread(target=cancel)
    thread.start()
    drive("import time\ntime.sleep(60)\n", nodes, tmp_path, grace=1.0)
    thread.join()
    assert state_of(paths).state == "cancelled"


def test_a_channel_cut_at_random_bytes_is_taken_up_again(nodes: TwoNodes, tmp_path: Path) -> None:
    nodes.cut = random.Random(7)
    cell = SUM + "for i in range(3000):\n    print(f'line {i} of', dist.get_rank())\n"
    paths = drive(cell, nodes, tmp_path)
    assert nodes.connections > 4
    assert state_of(paths).state == "succeeded"
    for rank in range(4):
        lines = paths.node(f"node{rank // 2}").out(rank).read_text().splitlines()
        assert lines[1:] == [f"line {i} of {rank}" for i in range(3000)]


def test_an_agent_that_is_killed_is_replaced(nodes: TwoNodes, tmp_path: Path) -> None:
    paths = JobPaths(tmp_path / "home" / "jobs" / JOB)

    def kill_agent() -> None:
        while not paths.journal.exists() or journal.state(paths).state != "running":
            time.sleep(0.05)
        from jupyter_torchdist.protocol import codec
        from jupyter_torchdist.protocol.process import ProcessId

        identity = next((nodes._directory / "node1" / "r").glob("agent-*/agent.json"))
        assert ProcessId.from_json(codec.loads(identity.read_bytes())["process"]).signal(signal.SIGKILL)

    thread = threading.Thread(target=kill_agent)
    thread.start()
    drive(SUM + "import time\ntime.sleep(3)\nprint('after')\n", nodes, tmp_path)
    thread.join()
    assert state_of(paths).state == "succeeded"
    assert paths.node("node1").out(3).read_text().endswith("after\n")


def test_a_driver_that_dies_before_the_second_node_began_leaves_nobody_waiting(
    nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first node's ranks would wait for the others in the rendezvous, for minutes."""

    class Died(Exception):
        pass

    def die(driver: Driver) -> None:
        raise Died

    monkeypatch.setattr(Driver, "_start_others", die)
    monkeypatch.setattr(Driver, "_give_up", lambda driver, error: None)
    with pytest.raises(Died):
        drive(SUM, nodes, tmp_path)
    monkeypatch.undo()
    home = Home(tmp_path / "home")
    paths = JobPaths(home.jobs / JOB)
    Driver(paths, lambda name: nodes, None, str(home.blobs)).run()
    state = state_of(paths)
    assert state.state == "failed"
    assert state.reason.startswith("the ranks could not be started")
