"""Two laptops that ask for GPUs of one host. Its GPUs are those of a library that answers as NVML does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree

import pytest

from jupyter_torchdist.client.job import Job, attach
from jupyter_torchdist.launchers.ssh import launcher
from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.verbs.parse import parse
from jupyter_torchdist.verbs.perform import perform
from tests import nvml
from tests.cluster.cells import PATIENCE, PYTHON
from tests.cluster.cluster import Cluster
from tests.cluster.resetting import end_masters
from tests.leaks import wait_until

LIBRARY = "/usr/lib/libnvidia-ml.so.1"
STOP = "/tmp/stop"
SCRIPT = f"echo on $CUDA_VISIBLE_DEVICES; until test -e {STOP}; do sleep 0.05; done"


class Laptop:
    """A machine with its own jobs and connections."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="td-", dir="/tmp"))
        self.home = Home(self.directory / "home")
        own = {"TORCHDIST_HOME": str(self.home.root), "TORCHDIST_RUNTIME_DIR": str(self.directory / "r")}
        self._environ = {**os.environ, **own}

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "jupyter_torchdist", "run", "--hosts", "node1", "--background", *options]
        words += ["--host-option", f"python={PYTHON}", "--no-python", "sh", "-c", SCRIPT]
        return subprocess.run(words, env=self._environ, capture_output=True, text=True, timeout=PATIENCE)

    def start(self, *options: str) -> Job:
        done = self.run(*options)
        assert done.returncode == 0, done.stderr
        return attach(done.stdout.strip(), self.home)


@pytest.fixture
def laptops(cluster: Cluster) -> Iterator[tuple[Laptop, Laptop]]:
    command, source = nvml.compilation(LIBRARY)
    cluster.run("node1", *command, text=source)
    both = Laptop(), Laptop()
    yield both
    launcher.let_go()
    end_masters(cluster)
    cluster.run("node1", "rm", "-f", LIBRARY, STOP)
    for laptop in both:
        rmtree(laptop.directory, ignore_errors=True)


def gpus_of(job: Job) -> str:
    assert wait_until(lambda: "on " in job.logs(0), PATIENCE), (job.state, job.logs())
    return job.logs(0).split()[1]


@pytest.mark.timeout(180)
def test_two_laptops_get_different_gpus(laptops: tuple[Laptop, Laptop], cluster: Cluster) -> None:
    here, there = laptops
    first = here.start("--gpus", "2")
    assert gpus_of(first) == "GPU-100,GPU-101"
    refused = there.run("--gpus", "2")
    assert refused.returncode == 1
    assert "1 of 3 GPUs are free: GPU 0 has job " + first.id + " of " in refused.stderr, refused.stderr
    second = there.start()  # what is free
    assert gpus_of(second) == "GPU-102"
    assert "0 of 3 free" in "".join(perform(parse(f"nodes --hosts node1 --host-option python={PYTHON}", "torchdist")))
    cluster.run("node1", "touch", STOP)
    for job in (first, second):
        assert job.wait(PATIENCE).state == "succeeded", job.state.reason
    assert not cluster.run("node1", "ls", "/tmp/torchdist-queue").stdout
