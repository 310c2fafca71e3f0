"""``--wait``: jobs of several kernels wait for GPUs. The GPUs are those of a library that answers as NVML does.

A job is a command, which opens no GPU: it prints those that it was given, and runs until a file is there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_torchdist.client.job import Job, attach
from jupyter_torchdist.protocol.paths import queue_dir
from jupyter_torchdist.store import catalog
from jupyter_torchdist.store.jobdir import read_plan
from tests.leaks import wait_until
from tests.nvml import compiled

PATIENCE = 60.0
ROOT = str(Path(__file__).parents[2])


class Machine:
    """A machine with three GPUs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environ = {**os.environ, "PYTHONPATH": ROOT, "TORCHDIST_NVML": str(compiled(directory))}

    def words(self, name: str, *options: str) -> list[str]:
        script = f"echo on $CUDA_VISIBLE_DEVICES; until test -e {self.directory}/{name}.ends; do sleep 0.05; done"
        own = ["--no-python", "--name", name, *options, "sh", "-c", script]
        return [sys.executable, "-m", "jupyter_torchdist", "run", *own]

    def run(self, name: str, *options: str) -> subprocess.CompletedProcess[str]:
        words = self.words(name, *options, "--background")
        return subprocess.run(words, env=self.environ, capture_output=True, text=True, timeout=PATIENCE)

    def start(self, name: str, *options: str) -> Job:
        done = self.run(name, *options)
        assert done.returncode == 0, done.stderr
        return attach(done.stdout.strip())

    def end(self, *names: str) -> None:
        for name in names:
            (self.directory / f"{name}.ends").touch()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("TORCHDIST_QUEUE", str(tmp_path / "queue"))
    return Machine(tmp_path)


def reaches(job: Job, state: str) -> bool:
    return wait_until(lambda: job.state.state == state, PATIENCE)


def queued(job: Job, words: str) -> bool:
    return wait_until(lambda: words in job.state.queued, PATIENCE)


def given(job: Job) -> str:
    """What ``CUDA_VISIBLE_DEVICES`` was on rank 0."""
    assert wait_until(lambda: "on " in job.logs(0), PATIENCE), (job.state, job.logs())
    return job.logs(0).split()[1]


@pytest.mark.timeout(300)
def test_a_queue(machine: Machine) -> None:
    first = machine.start("first", "--gpus", "2")
    assert given(first) == "GPU-100,GPU-101"
    second = machine.start("second", "--gpus", "2", "--wait")
    assert queued(second, f"position 1: 1 free, 2 wanted; GPU 0 has job {first.id}; GPU 1 has job {first.id}")
    third = machine.start("third", "--gpus", "1", "--wait", "--timeout", "1s")
    assert queued(third, f"position 2: after job {second.id}; 1 free, 1 wanted")
    fourth = machine.start("fourth", "--gpus", "3", "--wait")
    assert queued(fourth, f"position 3: after job {third.id}")

    refused = machine.run("fifth", "--gpus", "1")  # one is free, but others came first
    assert refused.returncode == 1
    assert f"have a queue of 3, and the first is job {second.id}" in refused.stderr
    assert "--wait takes the next place in it" in refused.stderr
    planned = subprocess.run(
        [*machine.words("x", "--gpus", "1", "--wait", "--plan")], env=machine.environ, capture_output=True, text=True
    )
    assert planned.returncode == 0 and "any-gpu-0" in planned.stdout, planned.stderr

    second.cancel()
    assert reaches(second, "cancelled")
    assert wait_until(lambda: third.state.queued == "", PATIENCE) and given(third) == "GPU-102"
    assert reaches(third, "timed_out")  # its clock did not run while it waited
    assert queued(fourth, "position 1: 1 free, 3 wanted")
    machine.end("first", "fourth")
    assert reaches(fourth, "succeeded") and first.state.state == "succeeded"
    assert read_plan(fourth.paths).nodes[0].gpus == ("GPU-100", "GPU-101", "GPU-102")
    assert given(fourth) == "GPU-100,GPU-101,GPU-102"
    assert wait_until(lambda: not list(queue_dir().iterdir()), PATIENCE)


@pytest.mark.timeout(240)
def test_who_dies_while_it_waits(machine: Machine) -> None:
    """The job of a dead client keeps its place. Without its driver the place is lost, which is told."""
    first = machine.start("first", "--gpus", "3")
    client = subprocess.Popen(
        machine.words("second", "--gpus", "3", "--wait"),
        env=machine.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert wait_until(lambda: any(job.name == "second" for job in catalog.jobs()), PATIENCE)
    second = attach("second")
    assert queued(second, "position 1")
    third = machine.start("third", "--gpus", "3", "--wait")
    assert queued(third, f"position 2: after job {second.id}")
    client.kill()
    client.wait()

    fourth = machine.start("fourth", "--gpus", "1", "--wait")
    assert queued(fourth, "position 3")
    driver = third.state.driver
    assert driver is not None
    os.kill(driver["pid"], signal.SIGKILL)
    assert wait_until(lambda: "position 2: after job " + second.id in fourth.state.queued, PATIENCE)
    assert wait_until(lambda: attach(third.id).state.final, PATIENCE)  # whoever asks starts another driver
    assert third.state.state == "lost", third.state
    assert "its driver ended while the job waited for its turn, so the place is lost" in third.state.reason
    assert f"`%dist rerun {third.id}` takes a new one" in third.state.reason

    machine.end("first", "second")
    assert reaches(second, "succeeded") and given(second) == "GPU-100,GPU-101,GPU-102"
    machine.end("fourth")
    assert reaches(fourth, "succeeded") and first.state.state == "succeeded"


@pytest.mark.timeout(240)
def test_a_job_that_is_started_again_keeps_its_gpus(machine: Machine) -> None:
    words = "echo on $CUDA_VISIBLE_DEVICES; test $TORCHELASTIC_RESTART_COUNT = 1 || exit 3; sleep 0.2"
    command = [sys.executable, "-m", "jupyter_torchdist", "run", "--gpus", "2", "--wait", "--restarts", "1"]
    done = subprocess.run(
        [*command, "--no-python", "sh", "-c", words], env=machine.environ, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[rank 0] on GPU-100,GPU-101") == 2
    assert list(queue_dir().iterdir()) == []


@pytest.mark.timeout(120)
def test_what_is_refused(machine: Machine, tmp_path: Path) -> None:
    for options, code, said in [
        (["--wait", "--ranks", "2"], 2, "--wait waits for GPUs of this machine"),
        (["--wait", "--gpus", "1", "--replace"], 2, "leave out --ranks, --replace, --hosts, --launcher"),
        (["--wait", "--gpus", "1", "--hosts", "a,b"], 2, "--wait waits for GPUs of this machine"),
        (["--wait", "--gpus", "1", "--remote", "--hosts", "a"], 2, "--wait waits for GPUs of this machine"),
        (["--wait", "--gpus", "4"], 1, "has 3 GPUs"),  # it would wait for ever
        (["--wait", "--gpus", "1", "--gpu-type", "A10"], 1, "has no GPU A10"),
        (["--wait=1", "--gpus", "1"], 2, "--wait takes no value"),
    ]:
        done = machine.run("no", *options)
        assert (done.returncode, said in done.stderr) == (code, True), (options, done.stderr)
    queue_dir().mkdir(exist_ok=True)
    queue_dir().chmod(0o777)
    done = machine.run("no", "--wait", "--gpus", "1")
    assert done.returncode == 1 and f"--wait: {tmp_path}/queue cannot be used" in done.stderr
    assert "with mode 1777" in done.stderr
    without = machine.start("yes", "--gpus", "1")  # as before there was a queue
    assert given(without) == "GPU-100"
    machine.end("yes")
    assert reaches(without, "succeeded")
    assert [job.name for job in catalog.jobs()] == ["yes"]
