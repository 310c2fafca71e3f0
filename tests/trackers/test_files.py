"""``--track tensorboard`` and ``--track wandb``: files that their own readers read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.protocol.errors import OptionError
from tests.trackers.conftest import Start, delivered

LOSSES = [(step, pytest.approx(1 / (step + 1))) for step in range(20)]


def test_tensorboard_reads_the_event_files(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "logs")
    job = start("--ranks 2 --name 'my digits' --track tensorboard")
    job.wait()
    known = delivered(job, "tensorboard")
    directory = tmp_path / "logs" / f"my_digits-{job.id}"
    assert known.link == str(directory), "relative to the directory of the notebook"
    read = accumulator.EventAccumulator(str(directory)).Reload()
    for name in ("loss", "rank_1/loss"):
        assert [(one.step, one.value) for one in read.Scalars(name)] == LOSSES
    assert [one.step for one in read.Scalars("speed")] == list(range(20))
    (text,) = {one.decode() for one in read.Tensors("tags")[-1].tensor_proto.string_val}
    assert f"|torchdist.hosts|{job.state.ranks[0].host}|" in text and "|torchdist.state|succeeded|" in text
    plugin = read.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"lr" in plugin and b"hunter2" not in plugin
    assert "_hparams_/session_end_info" in read.summary_metadata
    assert (directory / "logs" / "rank_1.out.txt").read_text() == "over\n"


def test_a_directory_of_event_files_that_is_gone_is_written_anew(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from jupyter_torchdist.verbs import parse
    from jupyter_torchdist.verbs.perform import perform
    from tests.leaks import wait_until

    (tmp_path / "runs").write_text("in the way")
    job = start("--ranks 1 --track tensorboard")
    job.wait()
    from jupyter_torchdist.store import tracking

    assert wait_until(lambda: "NotADirectoryError" in tracking.of(job.paths, "tensorboard").trouble)
    (tmp_path / "runs").unlink()
    delivered(job, "tensorboard")
    assert (tmp_path / "runs" / job.id / "logs" / "rank_0.out.txt").read_text() == "over\n"
    assert "delivers" not in "".join(perform(parse.parse(f"show {job.id}", "torchdist")))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "digits")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    return tmp_path / "wandb"


def records(file: Path) -> list[Any]:
    """The records of an offline run, as wandb's own messages: a log of blocks, as LevelDB's, after 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole, found = file.read_bytes(), 7, b"", []
    while at + 7 < len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        end = at + 7 + int.from_bytes(data[at + 4 : at + 6], "little")
        whole += data[at + 7 : end]
        if data[at + 6] in (1, 4):  # a record as a whole, or its last part
            found.append(Record.FromString(whole))
            whole = b""
        at = end
    return found


def test_wandb_reads_an_offline_run(start: Start, offline: Path) -> None:
    job = start("--ranks 2 --name digits --track wandb")
    job.wait()
    known = delivered(job, "wandb")
    (file,) = offline.glob(f"offline-run-*/run-{job.id}.wandb")
    assert Path(known.link) == file.parent and known.later == f"wandb sync {file.parent}"
    found = records(file)
    (run,) = [one.run for one in found if one.WhichOneof("record_type") == "run"][:1]
    assert (run.run_id, run.display_name, run.project) == (job.id, "digits", "digits")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["lr"] == 0.01 and config["ranks"] == 2 and "secret" not in config
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in one.history.item}
        for one in found
        if one.WhichOneof("record_type") == "history"
    ]
    for name in ("loss", "rank_1/loss"):
        assert sorted((row["global_step"], row[name]) for row in rows if name in row) == LOSSES
    assert [one.exit.exit_code for one in found if one.WhichOneof("record_type") == "exit"] == [0]


def test_wandb_without_a_key_is_refused_before_the_launch(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(OptionError, match="--track wandb: no API key is known"):
        start("--ranks 1 --track wandb")
    (tmp_path / "none").write_text("machine api.wandb.ai login user password secret\n")
    monkeypatch.setenv("WANDB_MODE", "online")
    from jupyter_torchdist.trackers.wandb import WandbTracker

    WandbTracker().check({"NETRC": str(tmp_path / "none")})
