"""Jobs whose driver is gone: a new one comes, and where none can, the job does not go on for ever."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_torchdist.node.unattended.orphans import DRIVER_TRIES, ORPHAN_SECONDS, RETRY_SECONDS, Orphans
from jupyter_torchdist.protocol.paths import JobPaths
from tests.leaks import wait_until


@pytest.fixture
def paths(tmp_path: Path) -> JobPaths:
    paths = JobPaths(tmp_path / "j")
    paths.root.mkdir()
    paths.spec.write_text("{}")
    return paths


@pytest.fixture
def care(tmp_path: Path) -> Iterator[Orphans]:
    care = Orphans(tmp_path / "driver.log")
    yield care
    assert wait_until(lambda: settled(care))


def settled(care: Orphans) -> bool:
    care.reap()
    return not care.pids


def driver_is(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``true``: the job's lock is held, so that a new driver leaves at once; ``false``: it fails."""
    monkeypatch.setattr(sys, "executable", shutil.which(program) or program)


def test_a_moment_alone_is_nothing(paths: JobPaths, care: Orphans) -> None:
    assert not care.hopeless(paths, None, 0.0)
    assert not care.hopeless(paths, None, ORPHAN_SECONDS)
    assert care.pids == set()


def test_one_driver_at_a_time(paths: JobPaths, care: Orphans, monkeypatch: pytest.MonkeyPatch) -> None:
    driver_is("true", monkeypatch)
    care.hopeless(paths, None, 0.0)
    assert not care.hopeless(paths, None, 1.0)
    (pid,) = care.pids
    assert not care.hopeless(paths, None, 1000.0)
    assert care.pids == {pid}


def test_a_driver_that_lives_is_waited_for(paths: JobPaths, care: Orphans, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped or slow, it still has the job's lock: new drivers leave at once, and the job goes on."""
    driver_is("true", monkeypatch)
    now = 0.0
    for _ in range(3 * DRIVER_TRIES):
        assert not care.hopeless(paths, None, now)
        now += RETRY_SECONDS + 0.1
        assert wait_until(lambda: settled(care))


def test_a_job_that_no_driver_can_read_is_given_up(
    paths: JobPaths, care: Orphans, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver_is("false", monkeypatch)
    now, started = 0.0, 0
    while not care.hopeless(paths, None, now):
        started += len(care.pids)
        now += RETRY_SECONDS + 0.1
        assert wait_until(lambda: settled(care))
    assert started == DRIVER_TRIES


def test_no_process_can_be_started(paths: JobPaths, care: Orphans, monkeypatch: pytest.MonkeyPatch) -> None:
    driver_is("/nonexistent/python", monkeypatch)
    assert any(care.hopeless(paths, None, step * (RETRY_SECONDS + 0.1)) for step in range(DRIVER_TRIES + 2))


def test_a_driver_that_took_the_job(paths: JobPaths, care: Orphans, monkeypatch: pytest.MonkeyPatch) -> None:
    driver_is("true", monkeypatch)
    care.hopeless(paths, None, 0.0)
    care.hopeless(paths, None, 1.0)
    (pid,) = care.pids
    care.claimed("j")
    assert care.pids == {pid}  # still our child, to be reaped
    assert not care.hopeless(paths, None, 100.0)  # alone again: the time begins anew


@pytest.mark.parametrize("what", ["ended", "removed"])
def test_a_job_that_needs_no_driver(what: str, paths: JobPaths, care: Orphans) -> None:
    paths.summary.write_text("{}") if what == "ended" else paths.spec.unlink()
    care.hopeless(paths, None, 0.0)
    assert care.hopeless(paths, None, 1.0)


def test_a_job_of_a_driver_elsewhere_has_a_lease(paths: JobPaths, care: Orphans) -> None:
    assert not care.hopeless(paths, 60.0, 0.0)
    assert not care.hopeless(paths, 60.0, 60.0)
    assert care.hopeless(paths, 60.0, 61.0)
    assert care.pids == set()
