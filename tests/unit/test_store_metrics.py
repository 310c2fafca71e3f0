"""Metrics: JSON lines by rank and offset."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.store import metrics
from jupyter_torchdist.testing import FakeJob


@pytest.fixture
def job(tmp_path: Path) -> FakeJob:
    job = FakeJob(Home(tmp_path / "home"), ranks=3, nodes=2)
    job.close()
    return job


def test_records_are_read_once_from_an_offset(job: FakeJob) -> None:
    assert metrics.read(job.paths, 0) == ([], 0)
    job.rank(0).records({"a": 1}, {"a": math.inf})
    job.rank(2).records({"b": 2**60})
    records, offset = metrics.read(job.paths, 0)
    assert records == [{"a": 1}, {"a": math.inf}]
    job.rank(0).records({"a": 3})
    assert metrics.read(job.paths, 0, offset)[0] == [{"a": 3}]
    assert metrics.read(job.paths, 2)[0] == [{"b": 2**60}]
    assert sorted(metrics.files(job.paths)) == [0, 2]


def test_torn_and_damaged_lines(job: FakeJob) -> None:
    job.rank(0).records({"a": 1})
    path = job.rank(0).files.metrics(0)
    whole = path.stat().st_size
    with open(path, "ab") as file:
        file.write(b'{"a": 2')
    assert metrics.read(job.paths, 0) == ([{"a": 1}], whole)
    with open(path, "ab") as file:
        file.write(b'}\nnonsense\n[1]\n\xff\xfe\n{"a":3}\n')
    assert metrics.read(job.paths, 0, whole)[0] == [{"a": 2}, {"a": 3}]


def test_a_read_is_bounded_but_goes_on(job: FakeJob) -> None:
    records: list[metrics.Record] = [{"a": number, "text": "x" * 50} for number in range(100)]
    job.rank(0).records(*records)
    seen, offset = [], 0
    for _ in range(1000):
        found, end = metrics.read(job.paths, 0, offset, limit=40)
        if end == offset:
            break
        assert len(found) <= 2
        seen += found
        offset = end
    assert seen == records


def test_curves_as_columns(job: FakeJob) -> None:
    assert metrics.columns(job.paths) == {"rank": [], "step": [], "t": []}
    job.rank(0).records({"t": 1.0, "k": "log", "step": 5, "v": {"loss": 2.0}}, {"t": 1.5, "k": "progress", "n": 1})
    job.rank(2).records({"t": 2.0, "k": "log", "step": None, "v": {"loss": 1.0, "step": 9}}, {"k": "log", "v": 3})
    assert metrics.columns(job.paths) == {
        "rank": [0, 2],
        "step": [5, None],
        "t": [1.0, 2.0],
        "loss": [2.0, 1.0],
        "step_": [None, 9],
    }
