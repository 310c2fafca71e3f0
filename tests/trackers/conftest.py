"""An MLflow server for the session, and a job that is tracked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.client.drivers import pool
from jupyter_torchdist.client.job import Job
from jupyter_torchdist.client.submit import Request, submit
from jupyter_torchdist.protocol.options.parsing import parse_options
from jupyter_torchdist.store import tracking
from tests.integration.conftest import agent_stays, connections
from tests.leaks import wait_until
from tests.trackers.road import Road

__all__ = ["agent_stays", "connections"]

CELL = """
import os
import time
import jupyter_torchdist as td

for step in range(20):
    td.log(loss=1 / (step + 1), step=step)
    td.log(speed=step * lr)
    while step == 10 and gate and not os.path.exists(gate):
        time.sleep(0.01)
print("over")
"""

Start = Callable[..., Job]


class Runs:
    """What the server has."""

    def __init__(self, port: int) -> None:
        import mlflow

        self.uri = f"http://127.0.0.1:{port}"
        self._client = mlflow.MlflowClient(self.uri)

    def of(self, job: str) -> list[Any]:
        every = [one.experiment_id for one in self._client.search_experiments()]
        return list(self._client.search_runs(every, f"tags.`torchdist.job` = '{job}'"))

    def create(self, experiment: str) -> str:
        """The name of a new experiment: ranks that make one of the same name at once refuse each other."""
        self._client.create_experiment(experiment)
        return experiment

    def named(self, experiment: str) -> list[Any]:
        found = self._client.get_experiment_by_name(experiment)
        return [] if found is None else list(self._client.search_runs([found.experiment_id]))

    def curve(self, run: Any, name: str) -> list[tuple[int, float]]:
        return sorted((one.step, one.value) for one in self._client.get_metric_history(run.info.run_id, name))

    def files(self, run: Any) -> set[str]:
        return {one.path for folder in ("job", "logs") for one in self._client.list_artifacts(run.info.run_id, folder)}


@pytest.fixture(scope="session")
def mlflow_port(tmp_path_factory: pytest.TempPathFactory, lasting: set[int]) -> Iterator[int]:
    """The port of a real server with its own database."""
    pytest.importorskip("mlflow.server", reason="make test-trackers installs MLflow's server")
    directory = tmp_path_factory.mktemp("mlflow")
    command = [sys.executable, "-m", "tests.trackers.server", str(directory)]
    with (directory / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    lasting.add(server.pid)
    assert server.stdout is not None
    yield int(server.stdout.readline())
    server.kill()
    server.wait()
    server.stdout.close()


@pytest.fixture
def start(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Submit ``source`` from an empty directory. ``CELL`` waits in its middle for the file ``gate``."""
    started: list[Job] = []
    monkeypatch.setenv("TORCHDIST_TRACK_SECONDS", "30")

    def run(options: str, source: str = CELL, **names: object) -> Job:
        names = {"lr": 0.01, "gate": "", "secret": "hunter2", **names}
        request = Request(source, "Cell In[1]", 2, parse_options(f"--out none {options}"), names, cwd=tmp_path)
        started.append(submit(request))
        return started[-1]

    yield run
    for job in started:
        for one in tracking.read(job.paths):
            if one.lives and one.process is not None:
                os.kill(one.process.pid, 9)
    pool().close()


@pytest.fixture
def runs(mlflow_port: int, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{mlflow_port}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "Cells")
    return Runs(mlflow_port)


@pytest.fixture
def road(mlflow_port: int) -> Iterator[Road]:
    """The way to the server, closed."""
    made = Road(mlflow_port)
    yield made
    made.close()


def delivered(job: Job, tracker: str, timeout: float = 60) -> tracking.Tracking:
    """The run, once everything of the job is delivered."""
    assert wait_until(lambda: tracking.of(job.paths, tracker).closed, timeout), tracking.lines(job.paths)
    return tracking.of(job.paths, tracker)
