"""Two laptops that ask for GPUs of one host. Its GPUs are those of a library that answers as NVML does."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from jupyter_torchdist.client.job import Job
from jupyter_torchdist.launchers.ssh import launcher
from jupyter_torchdist.verbs.parse import parse
from jupyter_torchdist.verbs.perform import perform
from tests import nvml
from tests.cluster.cells import PATIENCE, PYTHON
from tests.cluster.cluster import Cluster
from tests.cluster.laptop import Laptop
from tests.cluster.resetting import end_masters
from tests.leaks import wait_until

LIBRARY = "/usr/lib/libnvidia-ml.so.1"
STOP = "/tmp/stop"
SCRIPT = f"echo on $CUDA_VISIBLE_DEVICES; until test -e {STOP}; do sleep 0.05; done"


def run(laptop: Laptop, *options: str) -> subprocess.CompletedProcess[str]:
    return laptop.run("run", "--hosts", "node1", "--background", *options, "--no-python", "sh", "-c", SCRIPT)


def start(laptop: Laptop, *options: str) -> Job:
    done = run(laptop, *options)
    assert done.returncode == 0, done.stderr
    return laptop.job(done.stdout.strip())


@pytest.fixture
def laptops(cluster: Cluster) -> Iterator[tuple[Laptop, Laptop]]:
    command, source = nvml.compilation(LIBRARY)
    cluster.run("node1", *command, text=source)
    both = Laptop(), Laptop()
    yield both
    list(perform(parse(f"stop --hosts node1 --host-option python={PYTHON}", "torchdist")))  # its agent has the library
    launcher.let_go()
    end_masters(cluster)
    cluster.run("node1", "rm", "-f", LIBRARY, STOP)
    for laptop in both:
        laptop.close()


def gpus_of(job: Job) -> str:
    assert wait_until(lambda: "on " in job.logs(0), PATIENCE), (job.state, job.logs())
    return job.logs(0).split()[1]


@pytest.mark.timeout(180)
def test_two_laptops_get_different_gpus(laptops: tuple[Laptop, Laptop], cluster: Cluster) -> None:
    here, there = laptops
    first = start(here, "--gpus", "2")
    assert gpus_of(first) == "GPU-100,GPU-101"
    refused = run(there, "--gpus", "2")
    assert refused.returncode == 1
    assert "1 of 3 GPUs are free: GPU 0 has job " + first.id + " of " in refused.stderr, refused.stderr
    second = start(there)  # what is free
    assert gpus_of(second) == "GPU-102"
    assert "0 of 3 free" in "".join(perform(parse(f"nodes --hosts node1 --host-option python={PYTHON}", "torchdist")))
    cluster.run("node1", "touch", STOP)
    assert wait_until(lambda: first.state.state == second.state.state == "succeeded", PATIENCE), first.state
    assert not cluster.run("node1", "ls", "/tmp/torchdist-queue").stdout
