"""Who drives a job, and what its silence means. No clock but the one passed in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.protocol.process import ProcessId
from jupyter_torchdist.store import liveness
from jupyter_torchdist.testing import FakeJob

MINE = ProcessId.mine()
DEAD = replace(MINE, ticks=MINE.ticks + 1)
ELSEWHERE = ProcessId("far.example", "another-boot", "a-namespace", 77, 5)
REBOOTED = replace(MINE, boot="the-boot-before")
T = 1_000_000.0


@pytest.fixture
def job(tmp_path: Path) -> FakeJob:
    job = FakeJob(Home(tmp_path / "home"), now=T)
    job.close()
    return job


@pytest.mark.parametrize(
    ("process", "silent", "expected"),
    [
        (MINE, 10_000, "submitted"),
        (DEAD, 0, "orphaned"),
        (ELSEWHERE, 10, "submitted"),
        (ELSEWHERE, 61, "unreachable"),
        (ELSEWHERE, -500, "submitted"),  # that host's clock is ahead, or ours was set back
        (REBOOTED, 10, "submitted"),
        (REBOOTED, 61, "orphaned"),
    ],
)
def test_the_driver_decides(job: FakeJob, process: ProcessId, silent: float, expected: str) -> None:
    liveness.publish_driver(job.paths, process, T)
    assert liveness.effective_state(job.paths, now=T + silent) == expected


def test_a_job_no_driver_took(job: FakeJob) -> None:
    assert liveness.effective_state(job.paths, now=T + 1) == "submitted"
    assert liveness.effective_state(job.paths, now=T + 61) == "orphaned"
    job.paths.driver.write_text("damaged")
    assert liveness.effective_state(job.paths, now=T + 61) == "orphaned"
    job.paths.driver.write_text('{"process": {"pid": 3}, "beat": 5}')
    assert liveness.driver_of(job.paths) is None


def test_the_journal_names_a_driver_before_its_first_beat(tmp_path: Path) -> None:
    with FakeJob(Home(tmp_path / "home"), now=T) as job:
        job.tell("job.driver", process=MINE.to_json())
        assert liveness.effective_state(job.paths, now=T + 1000) == "submitted"
        liveness.publish_driver(job.paths, DEAD, T)
        assert liveness.effective_state(job.paths, now=T) == "submitted"
        job.tell("job.driver", process={"pid": 5})
        assert liveness.effective_state(job.paths, now=T) == "submitted", "what is malformed changes nothing"


def test_an_end_is_an_end(tmp_path: Path) -> None:
    job = FakeJob(Home(tmp_path / "home"), now=T)
    job.drive(DEAD).ended("failed")
    assert liveness.effective_state(job.paths, now=T + 1e6) == "failed"
