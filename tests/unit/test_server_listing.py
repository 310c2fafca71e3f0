"""The rows of the panel, from job directories that a test fills."""

from __future__ import annotations

import math
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.protocol.errors import StoreError
from jupyter_torchdist.protocol.paths import JobPaths
from jupyter_torchdist.protocol.paths import home as data
from jupyter_torchdist.server import listing
from jupyter_torchdist.server.glance import POINTS, Glance
from jupyter_torchdist.server.listing import Listing
from jupyter_torchdist.store import catalog, journal
from jupyter_torchdist.store.cache import JobSummary
from jupyter_torchdist.testing import FakeJob


def logged(step: int, **values: Any) -> dict[str, Any]:
    return {"t": 1.0, "k": "log", "step": step, "v": values}


def test_the_newest_first_and_each_as_it_is_now() -> None:
    rows = Listing(data())
    assert rows.rows() == []
    with FakeJob(now=1000.0) as old, FakeJob(now=2000.0) as new:
        assert [row["job"] for row in rows.rows()] == [new.paths.job, old.paths.job]
        old.running()
        assert [row["state"] for row in rows.rows()] == ["submitted", "running"]
        old.ended("cancelled", "it was stopped")
        assert [row["reason"] for row in rows.rows()] == ["", "it was stopped"]
        shutil.rmtree(new.paths.root)
        assert [row["job"] for row in rows.rows()] == [old.paths.job]


def test_a_job_whose_journal_was_lost_and_whose_summary_is_there() -> None:
    rows = Listing(data())
    with FakeJob() as job:
        job.running()
        rows.rows()
        job.ended()
        job.paths.journal.write_bytes(b"")
        (row,) = rows.rows()
    assert row["state"] == "succeeded"


def test_ended_jobs_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        FakeJob().running().ended()
    rows = Listing(data())
    first = rows.rows()
    monkeypatch.setattr(journal, "state", None)
    assert rows.rows() == first


def test_what_the_cache_knows_is_all_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        FakeJob(now=1000.0 + number).running().ended("failed", "why")
    catalog.jobs()
    for reader in ("read_spec", "read_plan"):
        monkeypatch.setattr(catalog, reader, None)
    monkeypatch.setattr(journal, "state", None)
    assert [(row["state"], row["reason"]) for row in Listing(data()).rows()] == [("failed", "why")] * 3


def test_a_new_job_costs_no_second_look_at_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeJob(now=1000.0) as going:
        FakeJob(now=2000.0).running().ended()
        rows = Listing(data())
        rows.rows()
        new = FakeJob(now=3000.0).running().ended()
        summarise = catalog._summarise
        read: list[str] = []

        def noted(paths: JobPaths) -> JobSummary | None:
            read.append(paths.job)
            return summarise(paths)

        monkeypatch.setattr(catalog, "_summarise", noted)
        assert len(rows.rows()) == 3
        assert read == [new.paths.job]
        going.running()
        assert [row["state"] for row in rows.rows()] == ["succeeded", "succeeded", "running"]


@pytest.mark.parametrize("ended", [True, False])
def test_a_damaged_job_is_listed_as_one(ended: bool) -> None:
    with FakeJob(now=1000.0) as job:
        if ended:
            job.running().ended()
        job.paths.spec.write_text("{")
        (row,) = Listing(data()).rows()
    assert row["damaged"]
    assert "spec.json is damaged" in row["reason"]
    catalog.remove(job.paths)
    assert Listing(data()).rows() == []


def test_the_directory_is_read_again_only_when_it_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeJob().running().ended()
    monkeypatch.setattr(listing, "SETTLED", 0.0)
    rows = Listing(data())
    first = rows.rows()
    with monkeypatch.context() as patch:
        patch.setattr(catalog, "jobs", None)
        assert rows.rows() == first
    FakeJob().close()
    assert len(rows.rows()) == 2


def test_one_thread_reads_and_the_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read = catalog.jobs
    calls = []

    def slowly(*arguments: Any) -> Any:
        calls.append(time.monotonic())
        time.sleep(0.05)
        return read(*arguments)

    monkeypatch.setattr(catalog, "jobs", slowly)
    rows = Listing(data())
    threads = [threading.Thread(target=rows.rows, args=(10.0,)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_an_unreadable_directory_is_said_and_tried_again(home: Path) -> None:
    home.mkdir()
    data().jobs.write_text("a file")
    rows = Listing(data())
    for _ in range(2):
        with pytest.raises(StoreError, match="cannot be read"):
            rows.rows()
    data().jobs.unlink()
    FakeJob().close()
    assert len(rows.rows()) == 1


def test_progress_is_rank_0s_or_the_lowest_ranks() -> None:
    with FakeJob() as job:
        glance = Glance(job.paths)
        assert glance.look() == (None, None, [], [])
        job.rank(1).records({"t": 1.0, "k": "progress", "id": 0, "desc": "load", "n": 1, "total": None})
        assert glance.look()[0] == {"desc": "load", "n": 1, "total": None}
        job.rank(0).records({"t": 1.0, "k": "progress", "id": 0, "desc": "epoch", "n": 2, "total": 9})
        assert glance.look()[0] == {"desc": "epoch", "n": 2, "total": 9}


def test_samples_are_those_of_all_ranks_where_all_are_looked_at() -> None:
    with FakeJob(ranks=2) as job:
        glance = Glance(job.paths)
        job.rank(0).records({"t": 1.0, "k": "samples", "n": 64}, {"t": 2.0, "k": "samples", "n": 128})
        job.rank(1).records({"t": 1.0, "k": "samples", "n": 100}, {"t": 2.0, "k": "progress", "n": 1})
        assert glance.look().samples == 228
        job.rank(1).records(*(logged(step, loss=0.5) for step in range(1000)))
        assert glance.look().samples == 228, "a count is kept while other lines come"
    with FakeJob(ranks=9) as job:
        for rank in range(9):
            job.rank(rank).records({"t": 1.0, "k": "samples", "n": 64})
        assert Glance(job.paths).look().samples is None


@pytest.mark.parametrize("points", [1, 2, 39, 40, 41, 100, 5000, 60_000])
def test_a_spark_line_is_short_and_goes_from_the_first_to_the_last_value(points: int) -> None:
    with FakeJob() as job:
        job.rank(0).records(*(logged(step, loss=float(step), other=0.0) for step in range(points)))
        spark = Glance(job.paths).look().spark
    assert min(points, 3) <= len(spark) <= POINTS
    assert spark == sorted(spark)
    assert (spark[0], spark[-1]) == (0.0, points - 1.0)


def test_a_spark_line_stays_where_it_is_while_the_file_grows() -> None:
    with FakeJob() as job:
        glance = Glance(job.paths)
        job.rank(0).records(*(logged(step, loss=math.sin(step)) for step in range(2000)))
        before = glance.look().spark
        job.rank(0).records(*(logged(step, loss=math.sin(step)) for step in range(2000, 2100)))
        after = glance.look().spark
        assert after[: len(before) - 1] == before[:-1]


def test_strange_metrics() -> None:
    with FakeJob() as job:
        job.rank(0).records(
            {"k": "log", "v": 3},
            {"k": "log", "step": 0, "v": {"lr": 0.1}, "auto": True},
            *(
                logged(0, loss=value)
                for value in (math.nan, math.inf, -math.inf, "text", None, True, 10**400, 1e308, 2.0)
            ),
            {"k": "progress", "n": "much"},
            {"k": "progress", "n": math.inf},
            {"k": "progress"},
            {"k": "samples", "n": "many"},
        )
        job.rank(0).prints("")
        path = job.rank(0).files.metrics(0)
        with open(path, "ab") as file:
            file.write(b"\xff\xfe\n[1]\n" + b"[" * 5000 + b'\n{"k": "log", "v": {"loss": 3.0')
        assert Glance(job.paths).look() == (None, None, [1e308, 2.0, 2.0], [])


def test_a_line_without_an_end() -> None:
    with FakeJob() as job:
        job.rank(0).records(logged(0, loss=1.0))
        with open(job.rank(0).files.metrics(0), "ab") as file:
            file.write(b"x" * 1_000_000)
        assert Glance(job.paths).look() == (None, None, [1.0], [])


def test_curves_whose_last_value_is_no_number_are_named_even_after_the_end() -> None:
    rows = Listing(data())
    with FakeJob() as job:
        job.running()
        job.rank(0).records(logged(0, loss=math.nan, lr=0.1), logged(1, loss=1.0, lr=0.1))
        assert rows.rows()[0]["broken"] == []
        job.rank(1).records(logged(0, loss=1.0, grad=-math.inf), logged(1, loss=math.nan))
        assert rows.rows()[0]["broken"] == ["loss", "grad"]
        job.ended()
        assert rows.rows()[0]["broken"] == ["loss", "grad"]


def test_ranks_that_wait_are_told_until_they_go_on() -> None:
    rows = Listing(data())
    with FakeJob(ranks=3) as job:
        job.running()
        waits = {"operation": "all_reduce", "group": "gloo:0", "number": 17, "counts": {"gloo:0": 17}}
        job.tell("rank.waiting", "node0", 0, since=job.now - 9, **waits)
        job.tell("rank.waiting", "node0", 1, since=job.now - 5, **waits)
        job.tell("rank.entered", "node0", 2, counts={"gloo:0": 16})
        wait = {"ranks": [0, 1], "collective": "all_reduce #17", "awaited": [2], "since": job.now - 9}
        assert rows.rows()[0]["wait"] == wait
        job.tell("rank.resumed", "node0", 0).tell("rank.resumed", "node0", 1)
        assert rows.rows()[0]["wait"] is None
