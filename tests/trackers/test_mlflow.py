"""``--track mlflow`` with a real server."""

from __future__ import annotations

from typing import Any

import pytest

from jupyter_torchdist.client.job import Job
from tests.trackers.conftest import Start, delivered


class Runs:
    """What the server has."""

    def __init__(self, port: int) -> None:
        import mlflow

        self.uri = f"http://127.0.0.1:{port}"
        self._client = mlflow.MlflowClient(self.uri)

    def of(self, job: Job) -> list[Any]:
        every = [one.experiment_id for one in self._client.search_experiments()]
        return list(self._client.search_runs(every, f"tags.`torchdist.job` = '{job.id}'"))

    def curve(self, run: Any, name: str) -> list[tuple[int, float]]:
        return sorted((one.step, one.value) for one in self._client.get_metric_history(run.info.run_id, name))

    def files(self, run: Any) -> set[str]:
        return {one.path for folder in ("job", "logs") for one in self._client.list_artifacts(run.info.run_id, folder)}


@pytest.fixture
def runs(mlflow_port: int, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{mlflow_port}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "Cells")
    return Runs(mlflow_port)


LOSSES = [(step, 1 / (step + 1)) for step in range(20)]


def test_a_job_is_one_run_with_everything(runs: Runs, start: Start) -> None:
    job = start("--ranks 2 --name digits --track mlflow")
    job.wait()
    known = delivered(job, "mlflow")
    (run,) = runs.of(job)
    assert (run.info.run_name, run.info.status) == ("digits", "FINISHED")
    assert known.link == f"{runs.uri}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
    assert (known.sent, known.refused, known.trouble) == (known.sent, 0, "") and known.sent >= 80
    assert runs.curve(run, "loss") == runs.curve(run, "rank_1/loss") == LOSSES
    assert runs.curve(run, "speed") == [(step, step * 0.01) for step in range(20)], "steps are counted where none is"
    params = run.data.params
    assert (params["lr"], params["pause"], params["ranks"], params["nodes"]) == ("0.01", "0.0", "2", "1")
    assert "secret" not in params and "hunter2" not in str(run.data)
    tags = run.data.tags
    assert tags["torchdist.bundle"] == job.manifest.stream.digest and tags["torchdist.state"] == "succeeded"
    assert tags["torchdist.hosts"] == job.state.ranks[0].host and tags["mlflow.source.name"] == "Cell In[1]"
    assert run.info.start_time == round(job.spec.created * 1000) and run.info.end_time == round(job.state.ended * 1000)
    assert runs.files(run) >= {"job/spec.json", "job/journal.jsonl", "logs/rank_0.out.txt", "logs/rank_1.out.txt"}
