"""``--launcher NAME``: engines that packages bring, found by their entry points."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_torchdist.protocol.paths import home
from jupyter_torchdist.protocol.state import JobState
from jupyter_torchdist.store import catalog, journal
from jupyter_torchdist.testing import FAKE_ENGINE, FakeSubmission
from jupyter_torchdist.views import job_text
from tests.leaks import wait_until

CELL = "import torch.distributed as dist\nprint('rank', dist.get_rank(), 'of', dist.get_world_size(), flush=True)\n"


def package(site: Path, name: str, point: str) -> None:
    """An installed package that registers one launcher."""
    info = site / f"{name}_engine-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-engine\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[jupyter_torchdist.launchers]\n{name} = {point}\n")


class Engine:
    """What a test sees of the fake engine; every command runs with the packages of ``site``."""

    def __init__(self, directory: Path) -> None:
        self.queue = directory / "queue"
        self.queue.mkdir()
        self.site = directory / "site"
        self.site.mkdir()
        self.script = directory / "train.py"
        self.script.write_text(CELL)
        self.runs: list[subprocess.Popen[str]] = []
        self.first("running")

    def first(self, word: str, position: int | None = None, reason: str = "") -> None:
        """What a new submission hears."""
        (self.queue / "first.json").write_text(json.dumps({"word": word, "position": position, "reason": reason}))

    def start(self, *options: str) -> subprocess.Popen[str]:
        environ = {**os.environ, FAKE_ENGINE: str(self.queue), "PYTHONPATH": str(self.site)}
        command = [sys.executable, "-m", "jupyter_torchdist", "run", *options, str(self.script)]
        self.runs.append(
            subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
        return self.runs[-1]

    def run(self, *options: str) -> tuple[int, str, str]:
        process = self.start(*options)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def waits(self) -> tuple[JobState, FakeSubmission]:
        """The only job, once it is queued."""
        assert wait_until(lambda: bool(state_here().queued))
        state = state_here()
        return state, FakeSubmission(self.queue, f"{state.job}-1")


def state_here() -> JobState:
    jobs = catalog.jobs()
    return journal.state(home().job(jobs[0].job)) if jobs else JobState()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    package(made.site, "fake", "jupyter_torchdist.testing:FakeLauncher")
    yield made
    for run in made.runs:
        if run.poll() is None:
            run.kill()
            run.communicate()


def test_a_launcher_of_a_package_runs_a_job(engine: Engine) -> None:
    code, out, err = engine.run("--launcher", "fake", "--ranks", "2")
    assert code == 0, err
    assert sorted(line for line in out.splitlines() if "rank" in line) == [
        "[rank 0] rank 0 of 2",
        "[rank 1] rank 1 of 2",
    ]
    job = catalog.jobs()[0].job
    assert json.loads((engine.queue / f"{job}-1").read_text())["word"] == "ended", "the nodes were not given back"


def test_a_queued_job_says_where_it_stands_and_then_runs(engine: Engine) -> None:
    engine.first("queued", 3, "waiting for GPUs")
    process = engine.start("--launcher", "fake", "--ranks", "2")
    state, submission = engine.waits()
    assert state.queued == "position 3: waiting for GPUs"
    assert "queued, position 3: waiting for GPUs · 2 ranks" in job_text.headline(state, state.submitted)
    submission.tell("queued", 1)
    assert wait_until(lambda: state_here().queued == "position 1")
    submission.tell("running")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "rank 1 of 2" in out
    assert state_here().queued == ""


def test_a_queued_job_that_is_cancelled_never_runs(engine: Engine) -> None:
    engine.first("queued")
    process = engine.start("--launcher", "fake", "--ranks", "2")
    state, submission = engine.waits()
    assert state.queued == "in the launcher's queue"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert state_here().state == "cancelled"
    assert not state_here().ranks
    assert submission.state().word == "ended"


def test_a_time_limit_ends_a_job_in_the_queue(engine: Engine) -> None:
    engine.first("queued")
    code, _, err = engine.run("--launcher", "fake", "--ranks", "2", "--timeout", "2s")
    assert code != 0
    assert state_here().state == "timed_out", err


def test_what_the_engine_ends_is_lost_with_its_reason(engine: Engine) -> None:
    engine.first("queued")
    process = engine.start("--launcher", "fake", "--ranks", "2")
    _, submission = engine.waits()
    submission.tell("ended", reason="cancelled by the administrator")
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert state_here().state == "lost"
    assert "the launcher ended it: cancelled by the administrator" in err


def test_another_driver_takes_a_queued_job_up(engine: Engine) -> None:
    engine.first("queued")
    process = engine.start("--launcher", "fake", "--ranks", "2")
    state, submission = engine.waits()
    first = state.driver
    assert first is not None
    os.kill(first["pid"], signal.SIGKILL)
    assert wait_until(lambda: (state_here().driver or first) != first)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert state_here().state == "cancelled"
    assert submission.state().word == "ended"


def test_an_unknown_launcher_lists_those_there_are(engine: Engine) -> None:
    code, _, err = engine.run("--launcher", "nobody", "--ranks", "2")
    assert code != 0
    assert "there is no launcher 'nobody'" in err
    assert "these are installed: fake, kubernetes, local" in err
    assert not catalog.jobs()


def test_a_package_that_cannot_be_imported_is_named_and_the_others_work(engine: Engine) -> None:
    (engine.site / "broken_engine.py").write_text("import a_module_that_nobody_has\n")
    package(engine.site, "broken", "broken_engine:Launcher")
    code, _, err = engine.run("--launcher", "broken", "--ranks", "2")
    assert code != 0
    assert "--launcher broken: package broken-engine 1.2 could not be loaded (broken_engine:Launcher)" in err
    assert "No module named 'a_module_that_nobody_has'" in err
    assert "other launchers still work: fake, kubernetes, local" in err
    code, out, err = engine.run("--launcher", "fake", "--ranks", "2")
    assert code == 0, err
    assert "rank 1 of 2" in out
