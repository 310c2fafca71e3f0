"""``--track mlflow`` with a real server."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from jupyter_torchdist.protocol.errors import OptionError, UserError
from jupyter_torchdist.store import tracking
from jupyter_torchdist.trackers.mlflow import MlflowTracker
from jupyter_torchdist.verbs import parse
from jupyter_torchdist.verbs.perform import perform
from tests.leaks import wait_until
from tests.trackers.conftest import Runs, Start, delivered
from tests.trackers.road import Road

LOSSES = [(step, 1 / (step + 1)) for step in range(20)]


def test_a_job_is_one_run_with_everything(runs: Runs, start: Start) -> None:
    job = start("--ranks 2 --name digits --track mlflow")
    job.wait()
    known = delivered(job, "mlflow")
    (run,) = runs.of(job.id)
    assert (run.info.run_name, run.info.status) == ("digits", "FINISHED")
    assert known.link == f"{runs.uri}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
    assert (known.sent, known.refused, known.trouble) == (known.sent, 0, "") and known.sent >= 80
    assert runs.curve(run, "loss") == runs.curve(run, "rank_1/loss") == LOSSES
    assert runs.curve(run, "speed") == [(step, step * 0.01) for step in range(20)], "steps are counted where none is"
    params = run.data.params
    assert (params["lr"], params["ranks"], params["nodes"]) == ("0.01", "2", "1")
    assert "secret" not in params and "hunter2" not in str(run.data)
    tags = run.data.tags
    assert tags["torchdist.bundle"] == job.manifest.stream.digest and tags["torchdist.state"] == "succeeded"
    assert tags["torchdist.hosts"] == job.state.ranks[0].host and tags["mlflow.source.name"] == "Cell In[1]"
    assert run.info.start_time == round(job.spec.created * 1000) and run.info.end_time == round(job.state.ended * 1000)
    assert runs.files(run) >= {"job/spec.json", "job/journal.jsonl", "logs/rank_0.out.txt", "logs/rank_1.out.txt"}


def test_how_a_job_ends_is_how_its_run_ends(runs: Runs, start: Start) -> None:
    failed = start("--ranks 2 --track mlflow", CELL_THAT_FAILS)
    cancelled = start("--ranks 2 --track mlflow", gate="/never")
    assert wait_until(lambda: cancelled.state.state == "running")
    cancelled.interrupt()
    delivered(failed, "mlflow"), delivered(cancelled, "mlflow")
    (run,) = runs.of(failed.id)
    assert run.info.status == "FAILED" and "ValueError: too large" in run.data.tags["torchdist.reason"]
    assert [one.info.status for one in runs.of(cancelled.id)] == ["KILLED"]


CELL_THAT_FAILS = "import jupyter_torchdist as td\ntd.log(loss=1.0, step=0)\nraise ValueError('too large')\n"


def test_a_server_that_is_down_from_the_start_loses_nothing(
    runs: Runs, start: Start, road: Road, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{road.port}")
    job = start("--ranks 1 --track mlflow")
    assert job.wait().state == "succeeded"
    assert wait_until(lambda: bool(tracking.of(job.paths, "mlflow").trouble))
    (line,) = tracking.lines(job.paths)
    assert line == ("mlflow: its server does not answer (Connection refused); nothing is lost, it is tried again"), (
        "and no link yet"
    )
    road.open()
    known = delivered(job, "mlflow")
    (run,) = runs.of(job.id)
    assert runs.curve(run, "loss") == LOSSES and known.said == ""


def test_a_server_whose_name_is_unknown_is_said_in_a_few_words(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.invalid:5000")
    monkeypatch.setenv("TORCHDIST_TRACK_SECONDS", "1")
    told = tmp_path / "told"
    job = start(
        "--ranks 1 --track mlflow", f"import os, time\nwhile not os.path.exists({str(told)!r}): time.sleep(0.05)"
    )
    assert wait_until(lambda: bool(tracking.of(job.paths, "mlflow").trouble))
    trouble = tracking.of(job.paths, "mlflow").trouble
    told.touch()
    assert job.wait().state == "succeeded"
    assert trouble.startswith("its server does not answer (") and len(trouble) < 80, trouble


def test_a_server_that_goes_down_in_the_middle_and_comes_back(
    runs: Runs, start: Start, road: Road, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{road.port}")
    road.open()
    job = start("--ranks 1 --track mlflow", gate=str(tmp_path / "gate"))
    assert wait_until(lambda: tracking.of(job.paths, "mlflow").sent >= 22)
    (run,) = runs.of(job.id)
    assert run.info.status == "RUNNING" and runs.curve(run, "loss") == LOSSES[:11], "it runs while its points arrive"
    assert wait_until(lambda: any(name.startswith("system/") for name in runs.of(job.id)[0].data.metrics))
    road.close()
    (tmp_path / "gate").touch()
    assert wait_until(lambda: bool(tracking.of(job.paths, "mlflow").trouble))
    assert job.wait(60).state == "succeeded"
    road.open()
    delivered(job, "mlflow")
    (run,) = runs.of(job.id)
    assert runs.curve(run, "loss") == LOSSES


def test_a_slow_server_does_not_delay_the_job(
    runs: Runs, start: Start, road: Road, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer takes longer than the client waits: the run is begun, though nobody hears of it, and found again."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{road.port}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    road.delay = 1.5
    road.open()
    job = start("--ranks 1 --track mlflow")
    assert job.wait(30).state == "succeeded"
    assert wait_until(lambda: "does not answer" in tracking.of(job.paths, "mlflow").trouble)
    road.delay = 0.0
    delivered(job, "mlflow")
    (run,) = runs.of(job.id)
    assert runs.curve(run, "loss") == LOSSES


def test_what_was_not_delivered_in_time_is_delivered_later(
    runs: Runs, start: Start, road: Road, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{road.port}")
    monkeypatch.setenv("TORCHDIST_TRACK_SECONDS", "0.5")
    job = start("--ranks 1 --track mlflow")
    job.wait()
    assert wait_until(lambda: "delivers the rest" in "".join(tracking.lines(job.paths)))
    shown = "".join(perform(parse.parse(f"show {job.id}", "torchdist")))
    assert re.search(
        f"mlflow: not everything is delivered: .*; `torchdist track {job.id} mlflow` delivers the rest", shown
    )
    with pytest.raises(UserError, match="mlflow: not everything is delivered"):
        list(perform(parse.parse(f"track {job.id}", "torchdist")))
    road.open()
    monkeypatch.setenv("TORCHDIST_TRACK_SECONDS", "30")
    said = "".join(perform(parse.parse(f"track {job.id}", "torchdist")))
    (run,) = runs.of(job.id)
    assert (
        said == f"mlflow: http://127.0.0.1:{road.port}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}\n"
    )
    assert (run.info.status, runs.curve(run, "loss")) == ("FINISHED", LOSSES)


def test_any_job_can_be_tracked_after_its_end(runs: Runs, start: Start) -> None:
    job = start("--ranks 1")
    job.wait()
    assert tracking.read(job.paths) == []
    with pytest.raises(Exception, match="was not launched with --track"):
        list(perform(parse.parse(f"track {job.id}", "torchdist")))
    with pytest.raises(OptionError, match="there is no tracker 'mlflo'"):
        list(perform(parse.parse(f"track {job.id} mlflo", "torchdist")))
    assert "/runs/" in "".join(perform(parse.parse(f"track {job.id} mlflow", "torchdist")))
    (run,) = runs.of(job.id)
    assert runs.curve(run, "loss") == LOSSES


def test_names_and_values_that_mlflow_does_not_take(runs: Runs, start: Start) -> None:
    source = """
import jupyter_torchdist as td
td.log(step=0, **{"loss/100 %": 1.0, "../up": 2.0, "": 3.0, "n" * 400: 4.0})
td.log(step=1, nothing=float("nan"), much=float("inf"))
td.log(step=2**52, late=1.0)
"""
    job = start("--ranks 1 --track mlflow", source)
    job.wait()
    known = delivered(job, "mlflow")
    (run,) = runs.of(job.id)
    assert {"loss/100 _", "up", "_", "nothing", "much", "late"} <= set(run.data.metrics)
    assert (known.refused, known.trouble) == (0, "")


def test_a_job_whose_files_are_removed_ends_its_tracker(
    runs: Runs, start: Start, road: Road, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{road.port}")
    job = start("--ranks 1 --track mlflow")
    job.wait()
    assert wait_until(lambda: tracking.of(job.paths, "mlflow").process is not None)
    process = tracking.of(job.paths, "mlflow").process
    assert process is not None and process.alive()
    list(perform(parse.parse(f"rm {job.id}", "torchdist")))
    assert wait_until(lambda: not process.alive(), 30) and not job.paths.root.exists()


def test_without_a_server_and_without_a_database_it_is_refused_before_the_launch(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with the extra alone: MLflow's client has no database."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match="MLFLOW_TRACKING_URI names no server, and MLflow's own database needs"):
        start("--ranks 1 --track mlflow")
    (tmp_path / "mlruns").mkdir()  # an older MLflow's files, which it goes on with
    MlflowTracker().check({})
