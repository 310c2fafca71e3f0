"""``--restarts N --nodes MIN:MAX``: hosts that are lost, and the ranks that start again on the others."""

from __future__ import annotations

import sys
import time
import types
from pathlib import Path

import pytest
import torch

from jupyter_torchdist.client import attach
from jupyter_torchdist.client.drivers import DriverPool
from jupyter_torchdist.node.unattended.neighbours import BEAT_SECONDS
from tests.cluster.cells import MEET, PATIENCE, kill_driver, start
from tests.cluster.cluster import Cluster
from tests.cluster.test_training import TRAIN
from tests.leaks import wait_until

AGAIN = f"""
import os, time
{MEET}
while dist.get_world_size() > 2:
    print("waits", flush=True)
    time.sleep(0.05)
value = os.environ["TORCHELASTIC_RESTART_COUNT"], dist.get_world_size(), socket.gethostname()
"""

THREE = f"""
import os, pathlib, time
{MEET}
folder, size = pathlib.Path("FOLDER"), dist.get_world_size()
(folder / f"{{size}}-{{dist.get_rank()}}").touch()
count, enough = 0, torch.zeros(1)
while enough < size:
    enough = torch.ones(1) * ((folder / "enough").exists() and size == 4)
    dist.all_reduce(enough)
    count += 1
    print("count", count, flush=True)
    time.sleep(0.05)
value = os.environ["TORCHELASTIC_RESTART_COUNT"], size, socket.gethostname()
"""
"""Ranks that need each other in every step, until there are four of them and a file ``enough``."""


@pytest.mark.timeout(240)
@pytest.mark.soak
@pytest.mark.parametrize(("gone", "left"), [("node1", "node2"), ("node2", "node1")])
def test_the_ranks_go_on_where_a_host_is_left(pool: DriverPool, cluster: Cluster, gone: str, left: str) -> None:
    job = start(pool, AGAIN, "--hosts node1,node2 --ranks 4 --nodes 1:2 --restarts 1 --collect all --out value")
    assert wait_until(lambda: all("waits" in job.logs(rank) for rank in range(4)), PATIENCE)
    cluster.poweroff(gone)
    assert job.wait(2 * PATIENCE).state == "succeeded", job.state.reason
    note = f"host {gone} is gone; all ranks are started again on the other host (1 of 1)"
    assert note in job.state.notes
    assert job.state.world_size == job.plan.world_size == 2
    assert [job.result(rank)["value"] for rank in range(2)] == [("1", 2, left)] * 2
    assert f"rank 1 on {left} sum 1.0" in job.logs(1)
    assert "rank 3 on node2 sum 6.0" in job.logs(), "what the lost host had printed is still there"


class Training:
    """A training over node1 and node2 that has saved step 3, and waits there until its ranks are started again."""

    def __init__(self, pool: DriverPool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alone, self.notebook = types.ModuleType("__main__"), types.ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", self.alone)
        exec(TRAIN, vars(self.alone))
        monkeypatch.setitem(sys.modules, "__main__", self.notebook)
        held = TRAIN.replace(
            "    for x, y", "    while epoch and restarts() == '0':\n        time.sleep(0.05)\n    for x, y"
        )
        source = f"import os, time\nrestarts = lambda: os.environ['TORCHELASTIC_RESTART_COUNT']\n{held}"
        source = source.replace("layers =", "print('start', restarts(), flush=True)\nlayers =")
        words = f"--hosts node1,node2 --ranks 4 --strategy fsdp --checkpoint {folder} -O checkpoint_steps=3"
        self.job = start(pool, source, f"{words} --nodes 1:2 --restarts 1", names=vars(self.notebook))
        self.folder = folder
        assert wait_until((folder / "step-000003").exists, PATIENCE), self.job.logs()

    def is_whole(self) -> None:
        """It ended as on one device, on the host that is left, and no line is missing or there twice."""
        job, notebook = self.job, self.notebook
        assert job.wait(2 * PATIENCE).state == "succeeded", (job.state.reason, job.logs())
        assert f"resumed at step 3 from {self.folder / 'step-000003'}" in job.state.notes
        assert sorted(line for line in job.logs().splitlines() if "] start" in line) == [
            *(f"[rank {rank}] start {count}" for rank in (0, 1) for count in (0, 1)),
            *(f"[rank {rank}] start 0" for rank in (2, 3)),
        ]
        job.bring(vars(notebook))
        for mine, theirs in zip(notebook.model.parameters(), self.alone.model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.fixture
def training(pool: DriverPool, everywhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    return Training(pool, everywhere / tmp_path.name, monkeypatch)


@pytest.mark.timeout(300)
def test_training_goes_on_from_the_last_checkpoint(cluster: Cluster, training: Training) -> None:
    cluster.poweroff("node2")
    training.is_whole()


@pytest.mark.timeout(300)
def test_training_goes_on_while_no_driver_is_connected(cluster: Cluster, training: Training) -> None:
    """And comes to its end. The driver that comes then has it all to follow."""
    kill_driver(training.job)
    cluster.poweroff("node2")
    assert wait_until((training.folder / "step-000008").exists, 2 * PATIENCE)
    assert training.job.state.attempt == 1
    training.is_whole()
    assert training.job.state.attempt == 2
    [note] = [note for note in training.job.state.notes if "node2" in note]
    assert note == (
        "node2 was lost while no driver was connected; all ranks were started again on the other host (1 of 1), "
        "without this machine"
    )
    again = training.job.plan
    assert [node.called for node in again.nodes] == ["node1"]
    assert again.died is not None
    assert (again.died.attempt, again.died.step) == (1, 4)


SIX = "--hosts node1,node2,node3 --ranks 6 --nodes 2:3 --restarts 2 --collect all --out value"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("gone", "left"), [("node1", ["node2", "node3"]), pytest.param("node3", ["node1", "node2"], marks=pytest.mark.soak)]
)
def test_two_of_three_hosts_go_on_by_themselves(
    pool: DriverPool, cluster: Cluster, everywhere: Path, tmp_path: Path, gone: str, left: list[str]
) -> None:
    """The first one may be missed, which is their steward. A driver that comes in between follows."""
    folder = everywhere / tmp_path.name
    folder.mkdir()
    job = start(pool, THREE.replace("FOLDER", str(folder)), SIX)
    assert wait_until(lambda: all("count 3\n" in job.logs(rank) for rank in range(6)), PATIENCE)
    kill_driver(job)
    cluster.poweroff(gone)
    assert wait_until(lambda: all((folder / f"4-{rank}").exists() for rank in range(4)), 2 * PATIENCE)
    attach(job.id, pool=pool)
    assert wait_until(lambda: job.state.attempt == 2 and job.state.state == "running", PATIENCE), job.state
    assert wait_until(lambda: all("count 3\n" in job.logs(rank) for rank in range(4)), PATIENCE)
    (folder / "enough").touch()
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason
    assert [job.result(rank)["value"] for rank in range(4)] == [("1", 4, node) for node in left for _ in range(2)]
    assert sorted(job.state.ranks) == [0, 1, 2, 3]


@pytest.mark.timeout(300)
def test_the_smaller_part_of_the_hosts_does_not_go_on(
    pool: DriverPool, cluster: Cluster, everywhere: Path, tmp_path: Path
) -> None:
    """A host that sees no other one cannot know whether these go on."""
    folder = everywhere / tmp_path.name
    folder.mkdir()
    job = start(pool, THREE.replace("FOLDER", str(folder)), SIX.replace("2:3", "1:3"))
    assert wait_until(lambda: all("count 3\n" in job.logs(rank) for rank in range(6)), PATIENCE)
    kill_driver(job)
    cluster.partition("node1", "node3")
    cluster.partition("node2", "node3")
    assert wait_until(lambda: all((folder / f"4-{rank}").exists() for rank in range(4)), 2 * PATIENCE)
    time.sleep(BEAT_SECONDS)
    assert not (folder / "2-0").exists()
    cluster.heal()
    (folder / "enough").touch()
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason
    assert [node.called for node in job.plan.nodes] == ["node1", "node2"]
