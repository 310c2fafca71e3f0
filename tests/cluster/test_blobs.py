"""Captured data on its way: once out of this machine, then from host to host, and on after a cut."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from jupyter_torchdist.client import Job
from jupyter_torchdist.client.drivers import DriverPool
from tests.cluster.cells import PATIENCE, SLEEP, start
from tests.cluster.cluster import Cluster
from tests.leaks import wait_until

SIZE = 40_000_000
SUM = "import hashlib\nprint(hashlib.sha256(data).hexdigest())\n"


def data(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(SIZE)


def carried(cluster: Cluster, node: str, way: str) -> int:
    """Bytes that a host got (``rx``) or sent (``tx``)."""
    return int(cluster.run(node, "cat", f"/sys/class/net/eth0/statistics/{way}_bytes").stdout)


def arrived(cluster: Cluster, node: str) -> int:
    """Bytes of the largest blob that is there, whole or in part."""
    found = cluster.run(node, "find", "/tmp", "-path", "*/blobs/*", "-printf", "%s\\n").stdout.split()
    return max(map(int, found), default=0)


@pytest.fixture
def counted(cluster: Cluster) -> Callable[[str], int]:
    """How many bytes all hosts got, or sent, since the test began."""
    before = {way: sum(carried(cluster, node, way) for node in cluster.nodes) for way in ("rx", "tx")}
    return lambda way: sum(carried(cluster, node, way) for node in cluster.nodes) - before[way]


def cancel(job: Job) -> None:
    job.cancel()
    assert job.wait(PATIENCE).state == "cancelled"


@pytest.mark.timeout(180)
def test_data_leaves_this_machine_once(pool: DriverPool, cluster: Cluster, counted: Callable[[str], int]) -> None:
    job = start(pool, SUM, "--hosts node1,node2,node3 --ranks 3", {"data": data(1)})
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason
    assert len({job.logs(rank, stream="out").strip() for rank in range(3)}) == 1
    assert counted("tx") > 2 * SIZE, "two hosts sent it on"
    again = start(pool, SUM, "--hosts node1,node2,node3 --ranks 3", {"data": data(1)})
    assert again.wait(PATIENCE).state == "succeeded", again.state.reason
    assert counted("tx") < 2.5 * SIZE, "it is there"


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_hosts_that_cannot_reach_each_other(pool: DriverPool, cluster: Cluster, counted: Callable[[str], int]) -> None:
    """All of it comes from this machine then. The ranks would not meet, either, so the job is ended."""
    for node in cluster.nodes:
        cluster.firewall(node, "1024-65535")
    job = start(pool, SUM + SLEEP, "--hosts node1,node2,node3 --ranks 3", {"data": data(2)})
    assert wait_until(lambda: all(arrived(cluster, node) >= SIZE for node in cluster.nodes), PATIENCE)
    cancel(job)
    assert counted("tx") < SIZE


@pytest.mark.timeout(180)
def test_an_upload_that_was_cut_is_gone_on_with(
    pool: DriverPool, cluster: Cluster, counted: Callable[[str], int]
) -> None:
    cluster.limit("node1", 80)
    job = start(pool, SUM, "--hosts node1 --ranks 1", {"data": data(3)})
    assert wait_until(lambda: arrived(cluster, "node1") > SIZE / 2, PATIENCE)
    cluster.link("node1", up=False)
    assert wait_until(lambda: any("cannot be reached" in note for note in job.state.notes), PATIENCE)
    cluster.link("node1", up=True)
    assert job.wait(2 * PATIENCE).state == "succeeded", job.state.reason
    assert counted("rx") < 1.3 * SIZE
