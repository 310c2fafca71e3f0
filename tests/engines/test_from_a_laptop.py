"""The notebook is on a machine that has none of an engine's programs, and may be a Mac; ranks are in the cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_torchdist.client.drivers import DriverPool
from jupyter_torchdist.views.plan_tables import plan_table
from tests.cluster.cells import MEET, PATIENCE, SLEEP, kill_driver, start
from tests.cluster.laptop import Mac
from tests.cluster.resetting import end_masters
from tests.engines.jobs import asleep, planned, refusal
from tests.engines.kubernetes_api import KubernetesApi
from tests.engines.kubernetes_pods import IMAGE
from tests.engines.slurm import Slurm
from tests.leaks import wait_until

SLURM = "--launcher slurm -O login=node1 --nodes 2"


@pytest.fixture
def login(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """Slurm's commands know the controller on ``node1`` only, whose login prints a greeting."""
    profile = f"echo Welcome to the cluster; echo Welcome >&2\nexport SLURM_CONF={slurm.conf}\n"
    slurm.bed.write("node1", "/etc/profile.d/slurm.sh", profile)
    monkeypatch.setenv("PATH", f"{slurm.bed.bin}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CONF", "/nowhere")
    yield slurm
    end_masters(slurm.bed)


@pytest.fixture
def mac(home: Path) -> Iterator[type[Mac]]:
    """Made by the test, so that it has the variables of its other fixtures."""
    made: list[Mac] = []

    class Made(Mac):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    yield Made
    for each in made:
        each.close()


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "meet.py").write_text(MEET)
    return str(tmp_path / "meet.py")


def test_slurm_over_ssh(login: Slurm, pool: DriverPool) -> None:
    plan = planned("slurm", "-O login=node1 --ranks 2").plan
    assert "sent to the launcher over SSH by node1:\n  #!/bin/sh" in plan_table(plan)
    job = start(pool, MEET + "float(total)", f"{SLURM} --ranks 4")
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason
    for rank in range(4):
        assert f"rank {rank} on node{rank // 2 + 1} sum 6.0" in job.logs(rank)
    assert job.value == 6.0

    job = start(pool, SLEEP, f"{SLURM} --ranks 2")
    assert wait_until(lambda: asleep(job), PATIENCE), job.state
    assert login.queue() == [f"{login.number(job)} torchdist-{job.id} RUNNING"]
    kill_driver(job)
    job.interrupt()
    assert job.wait(PATIENCE).state == "cancelled"
    assert wait_until(lambda: not login.queue())


@pytest.mark.soak
def test_an_allocation_over_ssh(login: Slurm, pool: DriverPool, monkeypatch: pytest.MonkeyPatch) -> None:
    allocation = login.occupy()
    monkeypatch.setenv("SLURM_JOB_ID", "1")  # of another cluster, in which this laptop is
    job = start(pool, MEET, f"--launcher slurm -O login=node1 -O allocation={allocation} --ranks 2")
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason
    assert [node.host for node in job.plan.nodes] == ["node1", "node2"]
    login.run("scancel", allocation)


def test_a_login_node_that_is_none(login: Slurm) -> None:
    said = refusal("slurm", "-O login=nowhere.invalid --ranks 2")
    assert "nowhere.invalid: ssh: Could not resolve hostname" in said and "check the name" in said
    login.bed.run("node2", "sh", "-c", "mkdir -p /opt/few; ln -sf /bin/sh /opt/few/sh")
    login.bed.write("node2", "/etc/profile.d/few.sh", "PATH=/opt/few\n")
    try:
        said = refusal("slurm", "-O login=node2 --ranks 2")
    finally:
        login.bed.run("node2", "rm", "/etc/profile.d/few.sh")
    assert "there is no sinfo, sbatch, srun, squeue, scancel, scontrol on node2" in said
    said = refusal("slurm", "-O login=node1 -O partition=nowhere --ranks 2")
    assert "Slurm refuses #SBATCH --partition=nowhere: invalid partition specified: nowhere" in said
    assert "Welcome" not in said


@pytest.mark.soak
def test_slurm_from_a_mac(mac: type[Mac], login: Slurm, script: str) -> None:
    """The Mac's directory stays until its connection has ended."""
    ran = mac().run("run", *SLURM.split(), "--ranks", "2", script)
    assert ran.returncode == 0, ran.stderr
    for rank in (0, 1):
        assert f"[rank {rank}] rank {rank} on node{rank + 1} sum 1.0" in ran.stdout


@pytest.mark.soak
def test_kubernetes_from_a_mac(kubernetes: KubernetesApi, mac: type[Mac], script: str) -> None:
    words = f"--launcher kubernetes -O image={IMAGE} --nodes 2 --ranks 2".split()
    ran = mac().run("run", *words, script)
    assert ran.returncode == 0, ran.stderr
    assert "[rank 1] rank 1 on torchdist-" in ran.stdout and ran.stdout.count("sum 1.0") == 2
