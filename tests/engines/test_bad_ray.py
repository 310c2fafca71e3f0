"""``--launcher ray`` with what it cannot do: each refusal in words, before anything is submitted; a lost node."""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib.util import find_spec

import pytest

from jupyter_torchdist.client.drivers import DriverPool
from tests.cluster.cells import PATIENCE, SLEEP
from tests.engines import jobs
from tests.engines.jobs import AGAIN, asleep
from tests.engines.ray_cluster import NODES, RayCluster, free_ports
from tests.engines.test_ray import start
from tests.leaks import wait_until

planned = partial(jobs.planned, "ray")
refusal = partial(jobs.refusal, "ray")


def test_without_ray_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    said = refusal("--ranks 2")
    assert f"the package ray, which is not installed in {sys.executable}" in said
    assert "pip install 'jupyter_torchdist[ray]'" in said


ray_is_here = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed here: make")


@ray_is_here
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--ranks 2 --hosts a,b", "Ray chooses the nodes"),
        ("--ranks 2 -O address=head", "-O address=head: expected the host and port of Ray's head"),
        ("--ranks 2 -O cpus=0 -O address=127.0.0.1:1", "-O cpus=0: expected a whole number"),
    ],
)
def test_options_that_ray_does_not_take(options: str, message: str) -> None:
    assert message in refusal(options)


@ray_is_here
def test_a_cluster_that_does_not_answer_is_named_with_where_the_address_comes_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (port,) = free_ports(1)
    said = refusal(f"--ranks 2 -O address=127.0.0.1:{port}")
    assert f"no Ray cluster answers (-O address=127.0.0.1:{port}): Connection refused" in said
    assert "`ray start --head` starts one" in said
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    assert f"(RAY_ADDRESS=127.0.0.1:{port})" in refusal("--ranks 2")


def test_more_than_the_cluster_has_is_refused(ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    where = f"the Ray cluster at {ray_cluster.address}"
    assert f"--nodes 3: {where} has 2 nodes → --nodes 2" in refusal("--nodes 3 --ranks 6")
    assert f"--gpus 8: 2 nodes of {where} have 2 each → --gpus 4" in refusal("--nodes 2 --gpus 8")
    assert f"--gpus 4: 1 node of {where} has 2 → --gpus 2, or --nodes 2" in refusal("--gpus 4")
    assert f"no node of {where} has a GPU H100: A100" in refusal("--gpus 1 --gpu-type H100")
    assert "has 4 CPUs → -O cpus=4" in refusal("--ranks 2 -O cpus=5")
    assert "-O partition is an option of --launcher slurm, not of ray" in refusal("--ranks 2 -O partition=a")
    monkeypatch.delenv("RAY_ADDRESS")
    plan = planned("--nodes 2 --gpus 4 -O cpus=3").plan  # of this machine: found without an address
    assert plan.allocation == ray_cluster.address
    bundle = '{"CPU": 3, "GPU": 2, "accelerator_type:A100": 0.001}'
    assert plan.request == f'{{"strategy": "STRICT_SPREAD", "bundles": [{bundle}, {bundle}]}}'


@pytest.mark.soak
def test_a_node_that_is_lost_ends_the_job_with_its_name(ray_pool: DriverPool, ray_cluster: RayCluster) -> None:
    job = start(ray_pool, SLEEP)
    assert wait_until(lambda: asleep(job), PATIENCE)
    ray_cluster.bed.poweroff("node2")
    try:
        assert job.wait(2 * PATIENCE).state in ("failed", "lost")
        assert "node2" in job.state.reason
    finally:
        ray_cluster.bed.start("node2")
        ray_cluster.start_node("node2")
        assert wait_until(lambda: ray_cluster.ask(NODES) == 3, PATIENCE)


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_node_that_is_lost_is_followed_by_a_start_on_the_node_that_comes(
    ray_pool: DriverPool, ray_cluster: RayCluster
) -> None:
    job = start(ray_pool, AGAIN, "--restarts 1 --grace 1s")
    assert wait_until(lambda: job.logs(stream="out").count("start 0") == job.plan.world_size, PATIENCE)
    ray_cluster.bed.poweroff("node2")
    try:
        assert wait_until(lambda: any("node2" in note for note in job.state.notes), 2 * PATIENCE), job.state.notes
    finally:
        ray_cluster.bed.start("node2")
        ray_cluster.start_node("node2")
        assert wait_until(lambda: ray_cluster.ask(NODES) == 3, PATIENCE)
    assert job.wait(2 * PATIENCE).state == "succeeded", job.state.reason
    assert job.value == 1


@pytest.mark.soak
def test_a_placement_group_that_somebody_removes_ends_the_job(ray_pool: DriverPool, ray_cluster: RayCluster) -> None:
    job = start(ray_pool, SLEEP)
    assert wait_until(lambda: asleep(job), PATIENCE)
    ray_cluster.ask(f"ray.util.remove_placement_group(ray.util.get_placement_group('torchdist-{job.id}.1'))")
    assert job.wait(PATIENCE).state in ("failed", "lost")
    assert "its placement group was removed in Ray" in job.state.reason


@pytest.mark.soak
def test_a_node_whose_directory_is_another_users_says_so(ray_pool: DriverPool, ray_cluster: RayCluster) -> None:
    place = f"/tmp/torchdist-{os.getuid()}"
    ray_cluster.bed.run("node1", "install", "-d", "-o", "1717", place)
    try:
        job = start(ray_pool, SLEEP)
        assert job.wait(PATIENCE).state in ("failed", "lost")
        assert f"{place} belongs to another user" in job.state.reason
    finally:
        ray_cluster.bed.run("node1", "rm", "-rf", place)
