"""``--launcher slurm`` on a real Slurm of two nodes: what a job gives, its end, its place in the queue, attaching."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from jupyter_torchdist.client import Job
from jupyter_torchdist.client.drivers import DriverPool
from tests.cluster.cells import MEET, PATIENCE, SLEEP
from tests.cluster.cells import start as started
from tests.engines.slurm import Slurm
from tests.leaks import wait_until


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of a notebook: ``__main__`` of this process for the length of the test."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main.__dict__


def start(pool: DriverPool, source: str, options: str = "", names: dict[str, Any] | None = None) -> Job:
    """Two nodes with two ranks each, unless ``options`` say otherwise."""
    return started(pool, source, f"--launcher slurm --nodes 2 --ranks 4 {options}", names)


def asleep(job: Job) -> bool:
    return job.logs(stream="out").count("asleep") == job.plan.world_size


def test_ranks_of_two_nodes_meet_and_their_values_come_back(pool: DriverPool, notebook: dict[str, Any]) -> None:
    exec("import torch\nweights = torch.zeros(3)", notebook)
    job = start(pool, MEET + "weights += total\nfloat(weights.sum())", names=notebook)
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason
    for rank in range(4):
        assert f"rank {rank} on node{rank // 2 + 1} sum 6.0" in job.logs(rank)
    job.bring(notebook)
    assert notebook["weights"].tolist() == [6.0, 6.0, 6.0]
    assert job.value == 18.0


def test_an_exception_of_a_rank_is_the_notebooks_own(pool: DriverPool) -> None:
    job = start(pool, MEET + "if dist.get_rank() == 3:\n    raise ValueError('no good')\ndist.barrier()\n")
    assert job.wait(PATIENCE).state == "failed"
    assert job.state.reason == "rank 3 on node2: ValueError: no good"
    with pytest.raises(ValueError, match="no good"):
        job.raise_for_state()


def test_a_cancel_ends_the_ranks_and_the_job_in_the_queue(pool: DriverPool, slurm: Slurm) -> None:
    job = start(pool, SLEEP)
    assert wait_until(lambda: asleep(job), PATIENCE)
    assert slurm.queue() == [f"{slurm.number(job)} torchdist-{job.id} RUNNING"]
    job.interrupt()
    assert job.wait(PATIENCE).state == "cancelled"
    assert wait_until(lambda: not slurm.queue(), 10)
