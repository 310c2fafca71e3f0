"""``--restarts N --nodes MIN:MAX``: hosts that are lost, and the ranks that start again on the others."""

from __future__ import annotations

import pytest

from jupyter_torchdist.client.drivers import DriverPool
from tests.cluster.cells import MEET, PATIENCE, start
from tests.cluster.cluster import Cluster
from tests.leaks import wait_until

AGAIN = f"""
import os, time
{MEET}
while dist.get_world_size() > 2:
    print("waits", flush=True)
    time.sleep(0.05)
value = os.environ["TORCHELASTIC_RESTART_COUNT"], dist.get_world_size(), socket.gethostname()
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("gone", "left"), [("node2", "node1"), ("node1", "node2")])
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
