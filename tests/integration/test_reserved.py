"""GPUs of a host that drivers of other machines ask for: its agents give each to one job.

The host is this machine, reached through relays. The ranks open no GPU, so its GPUs are names.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from jupyter_torchdist.capture import capture_cell, pack
from jupyter_torchdist.client.world import world_here
from jupyter_torchdist.driver.run import Driver
from jupyter_torchdist.planning.topology import make_plan
from jupyter_torchdist.protocol.errors import LaunchError
from jupyter_torchdist.protocol.machine.inventory import local_inventory
from jupyter_torchdist.protocol.paths import Home, JobPaths, queue_dir
from jupyter_torchdist.protocol.plan import NodePlan
from jupyter_torchdist.protocol.process import job_token, processes_of_job
from jupyter_torchdist.protocol.spec import JobSpec, Options
from jupyter_torchdist.store import journal
from jupyter_torchdist.store.blobs import BlobStore
from jupyter_torchdist.store.jobdir import create_job
from tests.integration.test_two_nodes import TwoNodes, disks
from tests.leaks import wait_until

__all__ = ["disks"]

PATIENCE = 60.0


class Laptop(TwoNodes):
    """A machine with its own home, whose driver reaches one agent of the host: its user's, or that of its version."""

    def __init__(self, directory: Path, agent: str, disk: Path) -> None:
        super().__init__(disk)
        self._agent = agent
        self._home = Home(directory / f"home-{id(self)}")
        self.stop = directory / f"stop-{id(self)}"
        self.restarts = 0

    def environment(self, node: str) -> dict[str, str]:
        return super().environment(self._agent)

    def drive(self, *gpus: str) -> JobPaths:
        """Run a job on these GPUs until ``stop`` exists."""
        self._home.blobs.mkdir(parents=True, exist_ok=True)
        job = f"reserved-{os.getpid()}-{time.time_ns()}"
        fails = f"if test -e {self.stop}.fails$TORCHELASTIC_RESTART_COUNT; then exit 3; fi"
        script = f"echo on $CUDA_VISIBLE_DEVICES; until test -e {self.stop}; do sleep 0.02; {fails}; done"
        options = Options(ranks=len(gpus), restarts=self.restarts)
        spec = JobSpec(job, "command", "", "sh", 1, options, time.time(), ("sh", "-c", script))
        plan = make_plan(spec, [local_inventory()])
        plan = replace(plan, nodes=(NodePlan("node0", tuple(range(len(gpus))), gpus),))
        capture = capture_cell("", "sh", 1, {}, cwd=self.stop.parent, stateless=True)
        self.paths = create_job(self._home, spec, plan, pack(capture, job, BlobStore(self._home).put))
        world = world_here(spec.options, self.stop.parent)
        with suppress(LaunchError):  # for the driver's log: the journal has it, too
            Driver(self.paths, lambda name: self, world, str(self._home.blobs)).run()
        return self.paths

    @contextmanager
    def running(self, *gpus: str) -> Iterator[str]:
        """The id of a job that runs on these GPUs, and that has succeeded or failed afterwards."""
        thread = threading.Thread(target=self.drive, args=gpus)
        thread.start()
        try:
            assert wait_until(lambda: hasattr(self, "paths") and self.lines() == [f"on {','.join(gpus)}"], PATIENCE)
            yield self.paths.job
        finally:
            self.stop.touch()
            thread.join(PATIENCE)

    def lines(self) -> list[str]:
        out = self.paths.node("node0").out(0)
        return out.read_text().splitlines() if out.exists() else []


def holds(pid: int, job: str) -> bool:
    """Whether a process has the file of a job open, which it locked."""
    with suppress(OSError):
        return any(fd.resolve() == queue_dir().resolve() / job for fd in Path(f"/proc/{pid}/fd").iterdir())
    return False


def given() -> list[str]:
    """The jobs that have GPUs."""
    return sorted(path.name for path in queue_dir().iterdir())


@pytest.fixture
def laptops(disks: Path, tmp_path: Path) -> Iterator[list[Laptop]]:
    """The third one reaches the agent of the first."""
    with ExitStack() as stack:
        made = [Laptop(tmp_path, agent, disks) for agent in ("a1", "a2", "a1")]
        for one in made:
            stack.callback(one.close)
        yield made


def refused(laptop: Laptop, gpu: str, holder: str) -> None:
    state = journal.state(laptop.drive(gpu))
    assert state.state == "failed" and laptop.lines() == []
    assert f"cannot run the job: {gpu} has job {holder} of " in state.reason
    assert "Ask for fewer --gpus, name other --hosts, or run the cell again later" in state.reason


@pytest.mark.timeout(240)
def test_a_gpu_has_one_job(laptops: list[Laptop]) -> None:
    first, second, third = laptops
    with first.running("GPU-0", "GPU-1") as job:
        refused(second, "GPU-1", job)
        refused(third, "GPU-0", job)
        with second.running("GPU-2"):  # what the first has not
            assert given() == [job, second.paths.job]
    assert journal.state(first.paths).state == journal.state(second.paths).state == "succeeded"
    assert wait_until(lambda: not given(), PATIENCE)
    third.stop.touch()
    assert journal.state(third.drive("GPU-0")).state == "succeeded"


@pytest.mark.timeout(240)
def test_who_dies(laptops: list[Laptop]) -> None:
    """Ranks keep their GPUs while they run, without an agent too. Where all of a job is dead, they are free."""
    first, second, third = laptops
    with first.running("GPU-0") as job:
        assert any(holds(process.pid, job) for process in processes_of_job(job_token(job, "node0")))
        welcomed = first.paths.node("node0").agent_events.read_text()
        agent = int(welcomed.split('"pid":', 1)[1].split(",")[0].split("}")[0])
        os.kill(agent, signal.SIGKILL)
        refused(second, "GPU-0", job)
        refused(third, "GPU-0", job)  # by the next agent, which follows the job
        for process in processes_of_job(job_token(job, "node0")):
            process.signal(signal.SIGKILL)
        assert wait_until(lambda: journal.state(first.paths).final, PATIENCE)
    assert journal.state(first.paths).state == "failed"
    assert wait_until(lambda: not given(), PATIENCE)
    second.stop.touch()
    assert journal.state(second.drive("GPU-0")).state == "succeeded"


@pytest.mark.timeout(240)
def test_a_job_that_is_started_again_keeps_its_gpus(laptops: list[Laptop]) -> None:
    first, second, _ = laptops
    first.restarts = 1
    with first.running("GPU-0") as job:
        Path(f"{first.stop}.fails0").touch()
        assert wait_until(lambda: len(first.lines()) == 2, PATIENCE)
        refused(second, "GPU-0", job)
    assert journal.state(first.paths).state == "succeeded"
