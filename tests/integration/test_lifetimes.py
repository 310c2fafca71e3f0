"""Whoever of the processes is killed, at whatever moment: the job ends and nothing is left (DESIGN section 6, 3)."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.paths import JobPaths
from jupyter_torchdist.protocol.process import ProcessId, processes_of_job
from jupyter_torchdist.store import journal, liveness
from tests.leaks import processes_of_runtime, wait_until
from tests.notebook import Notebook

VICTIMS = ("kernel", "driver", "agent", "zygote", "launcher", "rank")

CELL = """%%distribute --ranks 2 --background --grace 1s
import time, torch, torch.distributed as dist
for step in range(20):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.03)
"""

PATIENCE = 60.0
"""On a busy machine. Where nothing else runs, the job ends within some seconds; ``test_fault_soak.py`` holds that."""


class Scene:
    """A kernel, and the processes behind its newest job."""

    def __init__(self, runtime: Path, home: Path, start: Callable[[], Notebook]) -> None:
        self._runtime, self._home, self._start = runtime, home, start
        self.notebook = start()
        self.random = random.Random()

    def warm(self) -> None:
        """An agent and a zygote, so that the round is about the kill and not about a cold start."""
        self.notebook.run("%%distribute --ranks 2\npass")

    def submit(self) -> JobPaths:
        before = set((self._home / "jobs").glob("*"))
        self.notebook.run(CELL)
        (root,) = set((self._home / "jobs").glob("[!.]*")) - before
        return JobPaths(root)

    def find(self, victim: str, paths: JobPaths) -> ProcessId | None:
        if victim == "kernel":
            return ProcessId.of(self.notebook.pid)
        if victim == "driver":
            driver = liveness.driver_of(paths)
            return driver.process if driver else None
        if victim == "agent":
            files = list(self._runtime.glob("agent-*/agent.json"))
            return ProcessId.from_json(codec.loads(files[0].read_bytes())["process"]) if files else None
        if victim == "zygote":
            pids = [pid for pid in processes_of_runtime(self._runtime) if _runs(pid, "zygote") and not _of_job(pid)]
            return ProcessId.of(pids[0]) if pids else None
        events = journal.read(paths)[0]
        kind = "launcher.started" if victim == "launcher" else "rank.started"
        found = [ProcessId.from_json(event.data["process"]) for event in events if event.kind == kind]
        return self.random.choice(found) if found else None

    def kill(self, victim: str, paths: JobPaths, delay: float) -> bool:
        time.sleep(delay)
        process = self.find(victim, paths)
        killed = process is not None and process.signal(signal.SIGKILL)
        if victim == "kernel":
            wait_until(lambda: not self.notebook.manager.is_alive(), 5)
            self.notebook.restart()
            self.notebook.load()
        return killed

    def aftermath(self, paths: JobPaths) -> str:
        """What is wrong after a while; empty when the job is final and nothing of it is alive."""

        def over() -> bool:
            return journal.state(paths).final and not processes_of_job(paths.job) and not self._drivers(paths)

        wait_until(over, PATIENCE)
        state = journal.state(paths)
        if not state.final:
            return f"state {state.state}"
        left = [*processes_of_job(paths.job), *self._drivers(paths)]
        return f"{state.state}, but still there: {left}" if left else ""

    def _drivers(self, paths: JobPaths) -> list[ProcessId]:
        driver = liveness.driver_of(paths)
        return [driver.process] if driver is not None and driver.process.alive() else []


def _runs(pid: int, verb: str) -> bool:
    try:
        return f"jupyter_torchdist.node\0{verb}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _of_job(pid: int) -> bool:
    from jupyter_torchdist.protocol.process import job_token_of

    return bool(job_token_of(pid))


def _loop(scene: Scene, rounds: int, seed: int) -> None:
    scene.random.seed(seed)
    wrong = []
    for number in range(rounds):
        victim = VICTIMS[number % len(VICTIMS)]
        delay = scene.random.uniform(0.0, 1.0)
        scene.warm()
        paths = scene.submit()
        killed = scene.kill(victim, paths, delay)
        if trouble := scene.aftermath(paths):
            wrong.append(f"round {number}: {victim} killed ({killed}) after {delay:.3f} s: {trouble}")
            for process in processes_of_job(paths.job):
                process.signal(signal.SIGKILL)
    assert not wrong, "\n".join(wrong)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_random_kills(own_runtime: Path, home: Path, new_notebook: Callable[[], Notebook]) -> None:
    _loop(Scene(own_runtime, home, new_notebook), 25, seed=int(os.environ.get("TORCHDIST_SEED", "1")))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_500_random_kills(
    own_runtime: Path, home: Path, new_notebook: Callable[[], Notebook], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while a successor imports or takes over."""
    monkeypatch.delenv("TORCHDIST_SUCCESSORS")
    _loop(Scene(own_runtime, home, new_notebook), 500, seed=time.time_ns())
