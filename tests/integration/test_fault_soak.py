"""Seven signals for six kinds of process, in eight kinds of job, at any moment: each job ends as it should.

``TORCHDIST_FAULTS`` is how many faults (500), ``TORCHDIST_SEED`` repeats a run.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.paths import Home, JobPaths
from jupyter_torchdist.protocol.process import ProcessId, processes_of_job
from jupyter_torchdist.protocol.state import JobState
from jupyter_torchdist.store import journal, liveness, logs
from tests.leaks import processes_of_runtime, wait_until

LINES = 40
COLLECTIVES = "\n    dist.all_reduce(torch.ones(1))"

HEAD = "import os, subprocess, sys, time, torch, torch.distributed as dist\nrank = int(os.environ['RANK'])\n"
LOOP = HEAD + f"for step in range({LINES}):\n    print('line', step, flush=True)\n    time.sleep(0.02)"


@dataclass(frozen=True)
class Kind:
    """A job. ``state``: how it ends where nothing happens to it."""

    source: str
    options: tuple[str, ...] = ()
    state: str = "succeeded"
    lines: int = LINES


KINDS = {
    "prints": Kind(LOOP),
    "talks": Kind(LOOP + COLLECTIVES),
    "floods": Kind(HEAD + "for step in range(20_000):\n    print('line', step)", lines=20_000),
    "sleeps": Kind(HEAD + "time.sleep(0.8)", lines=0),
    "fails": Kind(LOOP + "\nif rank == 1:\n    raise ValueError('on purpose')", state="failed"),
    "has children": Kind(HEAD + "subprocess.Popen(['sleep', '60'])\n" + LOOP[len(HEAD) :]),
    "is fresh": Kind(LOOP, ("--fresh",)),
    "runs out of time": Kind(LOOP + "\ntime.sleep(60)", ("--timeout", "4s", "--grace", "1s"), "timed_out"),
}

SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP", "SIGHUP", "SIGQUIT", "SIGSEGV")
VICTIMS = ("client", "driver", "agent", "zygote", "launcher", "rank")

ASKED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""Signals with which a shell asks ``torchdist run`` to end its job."""

PATIENCE = 60.0
"""Seconds after which a job counts as stuck, on a busy machine too."""


class Scene:
    """One job of ``torchdist run``, and the processes behind it."""

    def __init__(self, runtime: Path, home: Path, directory: Path, kind: Kind) -> None:
        self._runtime, self._home, self._kind = runtime, Home(home), kind
        script = directory / "train.py"
        script.write_text(kind.source + "\n")
        known = set(self._home.jobs.glob("[!.]*"))
        command = [sys.executable, "-m", "jupyter_torchdist", "run", "--ranks", "2", *kind.options, str(script)]
        output = directory / "output"
        with open(output, "w") as file:
            self.client = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        assert wait_until(lambda: bool(set(self._home.jobs.glob("[!.]*")) - known)), output.read_text()
        (root,) = set(self._home.jobs.glob("[!.]*")) - known
        self.paths = JobPaths(root)

    def find(self, victim: str, choose: random.Random) -> ProcessId | None:
        if victim == "client":
            return ProcessId.of(self.client.pid)
        if victim == "driver":
            driver = liveness.driver_of(self.paths)
            return driver.process if driver else None
        if victim == "agent":
            found = [codec.loads(path.read_bytes())["process"] for path in self._runtime.glob("agent-*/agent.json")]
            return ProcessId.from_json(found[0]) if found else None
        if victim == "zygote":
            pids = [pid for pid in processes_of_runtime(self._runtime) if _is_zygote(pid)]
            return ProcessId.of(pids[0]) if pids else None
        events = journal.read(self.paths)[0]
        kind = "launcher.started" if victim == "launcher" else "rank.started"
        processes = [ProcessId.from_json(event.data["process"]) for event in events if event.kind == kind]
        return choose.choice(processes) if processes else None

    def hit(self, process: ProcessId, name: str) -> None:
        process.signal(getattr(signal, name))
        if name == "SIGSTOP":
            time.sleep(0.3)
            process.signal(signal.SIGCONT)

    def over(self) -> bool:
        return journal.state(self.paths).final and not processes_of_job(self.paths.job) and not self._driver_lives()

    def _driver_lives(self) -> bool:
        driver = liveness.driver_of(self.paths)
        return driver is not None and driver.process.alive()

    def wrong(self, victim: str, name: str) -> Iterator[str]:
        """What is not as it should be, once the job had its time."""
        if not wait_until(self.over, PATIENCE):
            left = processes_of_job(self.paths.job)
            yield f"not over: {journal.state(self.paths).state}, processes {left}, driver {self._driver_lives()}"
            return
        state = journal.state(self.paths)
        yield from _wrong_state(state, self._kind.state, victim, name)
        yield from _wrong_journal(self.paths)
        for file in logs.files(self.paths, stream="out"):
            numbers = [int(line.split()[1]) for line in logs.lines(file.path) if re.fullmatch(r"line \d+\n", line)]
            if numbers != list(range(len(numbers))):
                yield f"rank {file.rank}: lines are missing or doubled"
            if state.state == "succeeded" and len(numbers) != self._kind.lines:
                yield f"rank {file.rank}: {len(numbers)} of {self._kind.lines} lines"
        if not wait_until(lambda: self.client.poll() is not None, PATIENCE):
            yield "the client still waits"

    def close(self) -> None:
        for process in processes_of_job(self.paths.job):
            process.signal(signal.SIGKILL)
        if self.client.poll() is None:
            self.client.kill()
        self.client.wait()


def _is_zygote(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    from jupyter_torchdist.protocol.process import job_token_of

    return b"jupyter_torchdist.node\0zygote" in command and not job_token_of(pid)


def _wrong_state(state: JobState, own: str, victim: str, name: str) -> Iterator[str]:
    allowed = {own}
    if victim == "client" and name in ASKED:
        allowed.add("cancelled")
    if victim in ("launcher", "rank") and name != "SIGSTOP":
        allowed.add("failed")
    if state.state not in allowed:
        yield f"{state.state} ({state.reason}) instead of {own}"
    elif state.state == "failed" and own != "failed" and not re.search(r"rank|launcher", state.reason):
        yield f"failed without a word of its cause: {state.reason!r}"


def _wrong_journal(paths: JobPaths) -> Iterator[str]:
    events = journal.read(paths)[0]
    if [event.seq for event in events] != list(range(1, len(events) + 1)):
        yield f"numbers of events: {[event.seq for event in events]}"
    once = [(event.kind, event.rank) for event in events if event.kind in ("rank.done", "rank.failed", "job.ended")]
    if len(once) != len(set(once)):
        yield f"doubled events: {once}"
    if events[-1].kind != "job.ended":
        yield f"the last event is {events[-1].kind}"


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_random_faults(own_runtime: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDIST_SUCCESSORS", raising=False)
    count, seed = int(os.environ.get("TORCHDIST_FAULTS", "500")), int(os.environ.get("TORCHDIST_SEED", time.time_ns()))
    choose = random.Random(seed)
    cases = [(kind, victim, name) for kind in KINDS for victim in VICTIMS for name in SIGNALS]
    wrong: list[str] = []
    for number in range(count):
        kind, victim, name = choose.choice(cases)
        scene = Scene(own_runtime, home, tmp_path, KINDS[kind])
        try:
            delay = choose.uniform(0.0, 1.2)
            time.sleep(delay)
            process = scene.find(victim, choose)
            if process is not None:
                scene.hit(process, name)
            for trouble in scene.wrong(victim, name):
                wrong.append(f"{number}: a job that {kind}, {name} to {victim} after {delay:.2f} s: {trouble}")
                print(wrong[-1], flush=True)
        finally:
            scene.close()
    assert not wrong, f"seed {seed}:\n" + "\n".join(wrong)
