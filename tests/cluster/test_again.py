"""``--restarts N --nodes MIN:MAX``: hosts that are lost, and the ranks that start again on the others."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch

from jupyter_torchdist.client.drivers import DriverPool
from tests.cluster.cells import MEET, PATIENCE, start
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


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("gone", "left"), [("node1", "node2"), pytest.param("node2", "node1", marks=pytest.mark.soak)])
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


@pytest.mark.timeout(300)
def test_training_goes_on_from_the_last_checkpoint(
    pool: DriverPool, cluster: Cluster, everywhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", alone)
    exec(TRAIN, vars(alone))
    notebook = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    held = TRAIN.replace(
        "    for x, y", "    while epoch and restarts() == '0':\n        time.sleep(0.05)\n    for x, y"
    )
    source = f"import os, time\nrestarts = lambda: os.environ['TORCHELASTIC_RESTART_COUNT']\n{held}"
    folder = everywhere / tmp_path.name
    words = f"--hosts node1,node2 --ranks 4 --strategy fsdp --checkpoint {folder} -O checkpoint_steps=3"
    job = start(pool, source, f"{words} --nodes 1:2 --restarts 1", names=vars(notebook))
    assert wait_until((folder / "step-000003").exists, PATIENCE), job.logs()
    cluster.poweroff("node2")
    assert job.wait(2 * PATIENCE).state == "succeeded", (job.state.reason, job.logs())
    assert f"resumed at step 3 from {folder / 'step-000003'}" in job.state.notes
    job.bring(vars(notebook))
    for mine, theirs in zip(notebook.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
