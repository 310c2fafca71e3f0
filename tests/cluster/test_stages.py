"""A host that dies, or is out of reach for a while, at each stage of a job."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from jupyter_torchdist.client import Job
from jupyter_torchdist.client.drivers import DriverPool
from jupyter_torchdist.protocol.errors import LaunchError
from tests.cluster.cells import MEET, start
from tests.cluster.cluster import Cluster
from tests.leaks import wait_until

TRAIN = MEET + "import time\nfor step in range(80):\n    dist.all_reduce(total)\n    time.sleep(0.1)\n"
LARGE = MEET + "big = torch.randn(5_000_000)\n"
CUT_SECONDS = 5.0
PATIENCE = 120.0
"""A host is given up after half a minute."""


class Stage:
    """A job that is in this stage when ``begin`` returns, and the host that matters there."""

    def __init__(self, name: str, pool: DriverPool, cluster: Cluster) -> None:
        self.name, self._pool, self._cluster = name, pool, cluster
        self.host = "node1" if name == "result" else "node2"

    def begin(self) -> Job:
        stages = {"upload": self._upload, "rendezvous": self._rendezvous, "training": self._training}
        return stages.get(self.name, self._result)()

    def _says(self, job: Job, words: str) -> Job:
        assert wait_until(lambda: any(words in stage.text for stage in job.state.stages), PATIENCE)
        return job

    def _upload(self) -> Job:
        self._cluster.limit("node2", 30)
        data = np.random.default_rng(0).bytes(40_000_000)
        return self._says(start(self._pool, MEET + "print(len(data))\n", names={"data": data}), "sending")

    def _rendezvous(self) -> Job:
        return self._says(start(self._pool, TRAIN), "starting Python on")

    def _training(self) -> Job:
        job = start(self._pool, TRAIN)
        assert wait_until(lambda: "sum" in job.logs(3), PATIENCE)
        return job

    def _result(self) -> Job:
        self._cluster.limit("node1", 20)
        job = start(self._pool, LARGE, "--hosts node1,node2 --ranks 4 --out big")
        assert wait_until(lambda: 0 in job.state.ranks and job.state.ranks[0].state == "done", PATIENCE)
        return job


@pytest.fixture(params=["upload", "rendezvous", "training", "result"])
def stage(request: pytest.FixtureRequest, pool: DriverPool, cluster: Cluster) -> Iterator[Stage]:
    yield Stage(request.param, pool, cluster)
    cluster.heal()


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["kill", "poweroff"])
def test_a_host_that_dies_is_named(stage: Stage, cluster: Cluster, fault: str) -> None:
    job = stage.begin()
    getattr(cluster, fault)(stage.host)
    assert job.wait(PATIENCE).state in ("lost", "failed")
    assert stage.host in job.state.reason, job.state.reason


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_host_that_is_out_of_reach_for_seconds_changes_nothing(stage: Stage, cluster: Cluster) -> None:
    job = stage.begin()
    cluster.link(stage.host, up=False)
    time.sleep(CUT_SECONDS)
    cluster.link(stage.host, up=True)
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["kill", "poweroff"])
def test_a_host_that_is_dead_before_the_job(pool: DriverPool, cluster: Cluster, fault: str) -> None:
    getattr(cluster, fault)("node2")
    with pytest.raises(LaunchError, match="node2"):
        start(pool, MEET)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_host_that_dies_while_it_is_asked(pool: DriverPool, cluster: Cluster) -> None:
    cluster.delay("node2", 500)
    dead = threading.Timer(1.0, cluster.poweroff, ["node2"])
    dead.start()
    with pytest.raises(LaunchError, match="node2"):
        start(pool, MEET)
    dead.join()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_slow_uplink(pool: DriverPool, cluster: Cluster) -> None:
    """64 MB with 8 Mbit/s and 200 ms: the host is never taken for dead, and the job says how far it is."""
    cluster.limit("node1", 8)
    cluster.delay("node1", 100)
    data = np.random.default_rng(1).bytes(64_000_000)
    job = start(pool, "print(len(data))\n", "--hosts node1 --ranks 1", names={"data": data})
    assert job.wait(300).state == "succeeded", job.state.reason
    assert not any("cannot be reached" in note for note in job.state.notes), job.state.notes
