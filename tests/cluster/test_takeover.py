"""A job that another machine started on hosts, taken over by one that does not have its directory."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from jupyter_torchdist.client import Job
from jupyter_torchdist.client.drivers import DriverPool
from jupyter_torchdist.client.takeover import take_over
from jupyter_torchdist.launchers.ssh import launcher
from jupyter_torchdist.protocol.hosts import hosts_of
from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.protocol.process import ProcessId
from tests.cluster.cells import MEET, PATIENCE, PYTHON, kill_driver, start
from tests.cluster.cluster import Cluster
from tests.cluster.laptop import Laptop
from tests.cluster.resetting import end_masters
from tests.leaks import wait_until

SETTINGS = (f"python={PYTHON}",)
BOTH = ("node1", "node2")
CELL = (
    MEET
    + """
import os, time
while not os.path.exists('/tmp/go'):
    time.sleep(0.05)
print('went on')
answer = 40 + 2
"""
)


@pytest.fixture(autouse=True)
def gate(cluster: Cluster) -> Iterator[None]:
    yield
    for node in cluster.nodes:
        cluster.run(node, "rm", "-f", "/tmp/go")


@pytest.fixture
def desk(cluster: Cluster) -> Iterator[Laptop]:
    laptop = Laptop()
    yield laptop
    launcher.let_go()
    end_masters(cluster)
    laptop.close()


def go(cluster: Cluster) -> None:
    for node in BOTH:
        cluster.run(node, "touch", "/tmp/go")


def met(job: Job) -> bool:
    return all("sum 6.0" in job.logs(rank) for rank in range(job.plan.world_size))


def here(text: str, pool: DriverPool, home: Path) -> Job:
    return take_over(text, hosts_of(BOTH, SETTINGS), SETTINGS, Home(home), pool)


@pytest.mark.timeout(200)
def test_a_job_goes_on_at_another_machine(pool: DriverPool, cluster: Cluster, desk: Laptop) -> None:
    first = start(pool, CELL, "--hosts node1,node2 --ranks 4 --name night")
    assert wait_until(partial(met, first), PATIENCE)
    attached = desk.start("attach", "night", "--hosts", "node1,node2")
    assert wait_until(lambda: first.state.final, PATIENCE)
    assert first.state.state == "lost"
    assert "has taken the job over, where it goes on; `torchdist attach" in first.state.reason
    second = desk.job("night")
    assert wait_until(partial(met, second), PATIENCE)  # what was printed before
    go(cluster)
    said, errors = attached.communicate(timeout=PATIENCE)
    assert attached.returncode == 0, errors
    for rank in range(4):
        assert f"[rank {rank}] went on" in said, (said, errors)
    assert second.result(0)["answer"] == 42
    assert second.state.ranks[3].host == "node2"


@pytest.mark.timeout(200)
def test_a_job_that_ended_while_its_machine_was_off(pool: DriverPool, cluster: Cluster, desk: Laptop) -> None:
    first = start(pool, CELL)
    assert wait_until(partial(met, first), PATIENCE)
    driver = ProcessId.from_json(first.state.driver)
    driver.signal(signal.SIGSTOP)  # the lid is closed
    try:
        go(cluster)
        done = desk.run("attach", first.id[:-2], "--hosts", "node1,node2")
        assert done.returncode == 0, done.stderr
        assert desk.job(first.id).result(0)["answer"] == 42
    finally:
        driver.signal(signal.SIGCONT)
    assert wait_until(lambda: first.state.final, PATIENCE)


@pytest.mark.soak
@pytest.mark.timeout(200)
def test_and_back(pool: DriverPool, cluster: Cluster, desk: Laptop, home: Path) -> None:
    first = start(pool, CELL)
    assert wait_until(partial(met, first), PATIENCE)
    there = desk.start("attach", first.id, "--hosts", "node1,node2")
    assert wait_until(lambda: first.state.state == "lost", PATIENCE)
    again = here(first.id, pool, home)
    there.communicate(timeout=PATIENCE)
    assert there.returncode and desk.job(first.id).state.state == "lost"
    assert here(first.id, pool, home).plan.driver == 3  # it is here: nothing is fetched
    kill_driver(again)
    go(cluster)
    assert again.wait(PATIENCE).state == "succeeded", again.state.reason
    assert again.result(0)["answer"] == 42


@pytest.mark.timeout(200)
def test_what_is_not_there(pool: DriverPool, cluster: Cluster, desk: Laptop) -> None:
    job = start(pool, CELL, "--hosts node1,node2 --ranks 2")
    assert wait_until(lambda: "sum 1.0" in job.logs(0), PATIENCE)
    for text, hosts, said in [
        ("nonsense", "node1,node2", "node1 has nothing of a job 'nonsense'"),
        ("../jobs", "node1", "node1 has nothing of a job '../jobs'"),
        (job.id, "node1,node3", f"node3 has nothing of a job '{job.id}'"),
        (job.id, "node2", f"job {job.id} runs on node1 as well"),
    ]:
        done = desk.run("attach", text, "--hosts", hosts)
        assert done.returncode and said in done.stderr, done.stderr
    assert not desk.home.jobs.exists() or not list(desk.home.jobs.iterdir())
    go(cluster)
    assert job.wait(PATIENCE).state == "succeeded"  # nobody took it
    done = desk.run("attach", job.id, "--hosts", "node1,node2")
    assert done.returncode and f"node1 has nothing of a job '{job.id}'" in done.stderr
