"""``--launcher ray`` on a real Ray of two nodes: what a job gives, its end, its wait, attaching."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.client import Job
from jupyter_torchdist.client.drivers import DriverPool
from tests.cluster.cells import MEET, PATIENCE, SLEEP, kill_driver
from tests.cluster.cells import start as started
from tests.engines.jobs import COUNT, asleep, said
from tests.engines.ray_cluster import LEFT, RayCluster
from tests.integration.test_gallery import execute
from tests.leaks import wait_until
from tests.notebook import apart


def start(pool: DriverPool, source: str, options: str = "", names: dict[str, Any] | None = None) -> Job:
    """Two nodes with two ranks each, unless ``options`` say otherwise."""
    return started(pool, source, f"--launcher ray --nodes 2 --ranks 4 {options}", names, python=None)


def test_ranks_of_two_nodes_give_values_and_lines_beyond_the_end_of_a_driver(
    ray_pool: DriverPool, notebook: dict[str, Any]
) -> None:
    exec("import torch\nweights = torch.zeros(3)", notebook)
    job = start(ray_pool, COUNT, names=notebook)
    assert wait_until(lambda: "line 10" in job.logs(3), PATIENCE), job.state.reason
    kill_driver(job)
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason
    places = [job.logs(rank).split(" sum ")[0].split()[-1] for rank in range(4)]
    assert places[0] == places[1] and places[2] == places[3] and {*places} == {"node1", "node2"}
    for rank in range(4):
        assert "sum 6.0" in job.logs(rank)
        assert [line for line in job.logs(rank).splitlines() if "line" in line] == [f"line {n}" for n in range(60)]
    job.bring(notebook)
    assert notebook["weights"].tolist() == [6.0, 6.0, 6.0]
    assert job.value == 18.0


@pytest.mark.soak
def test_an_exception_of_a_rank_is_the_notebooks_own(ray_pool: DriverPool) -> None:
    job = start(ray_pool, MEET + "if dist.get_rank() == 3:\n    raise ValueError('no good')\ndist.barrier()\n")
    assert job.wait(PATIENCE).state == "failed"
    assert "rank 3 on node" in job.state.reason and "ValueError: no good" in job.state.reason
    with pytest.raises(ValueError, match="no good"):
        job.raise_for_state()


def test_a_cancel_leaves_nothing_in_ray(ray_pool: DriverPool, ray_cluster: RayCluster) -> None:
    job = start(ray_pool, SLEEP)
    assert wait_until(lambda: asleep(job), PATIENCE)
    group = f"torchdist-{job.id}.1"
    assert sorted(ray_cluster.ask(LEFT)) == [group, f"{group}.0", f"{group}.1"]
    job.interrupt()
    assert job.wait(PATIENCE).state == "cancelled"
    assert wait_until(lambda: not ray_cluster.left()), ray_cluster.left()


@pytest.mark.soak
def test_a_job_waits_for_nodes_and_can_be_cancelled(ray_pool: DriverPool, ray_cluster: RayCluster) -> None:
    with ray_cluster.taken(3):
        job = start(ray_pool, SLEEP)
        assert wait_until(lambda: "waiting for 2 nodes" in said(job), PATIENCE), said(job)
        assert said(job) == "waiting for 2 nodes with 2 CPU each; free in the whole cluster: 2 CPU and 4 GPU"
        job.interrupt()
        assert job.wait(PATIENCE).state == "cancelled"


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_the_notebook_and_a_ray_of_its_own(ray_cluster: RayCluster, tmp_path: Path) -> None:
    texts = execute("ray", tmp_path)
    assert "STRICT_SPREAD" in texts["plan"]
    run = apart(texts["run"])
    assert all(f"rank {rank} of 4 on node" in run for rank in range(4)) and {"node1", "node2"} <= {*run.split()}
    assert "Sequential (64, 8) loss 0." in texts["back"] and "'succeeded'" in texts["back"]
    assert "'CPU'" in texts["launched"] and "[14, None]" in texts["launched"]
