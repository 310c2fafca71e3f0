"""The catalog: the directories are the truth, the cache may be lost, locked or refused at any time."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

import pytest

from jupyter_torchdist.protocol.errors import JobNotFound, StoreError
from jupyter_torchdist.protocol.machine.packages import KEPT_SECONDS
from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.protocol.process import ProcessId
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.store import blobs, cache, catalog, jobdir
from jupyter_torchdist.testing import FakeJob

DEAD = ProcessId.mine().__class__(**{**ProcessId.mine().to_json(), "pid": 2**22 - 1, "ticks": 1})


@pytest.fixture
def place(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def make(place: Home, job: str, now: float = 1e6, state: str = "succeeded", name: str | None = None) -> FakeJob:
    fake = FakeJob(place, job=job, now=now, options=Options(ranks=2, name=name), notebook="n.ipynb").running()
    fake.now += 10
    return fake.ended(state) if state else fake


def test_jobs_are_listed_newest_first(place: Home) -> None:
    assert catalog.jobs(place) == []
    make(place, "20260101-000000-aaaaaa", 1e6, name="first")
    make(place, "20260101-000001-bbbbbb", 3e6, "failed")
    with make(place, "20260101-000002-cccccc", 2e6, ""):
        listed = catalog.jobs(place)
    assert [(item.job[-6:], item.state, item.name, item.submitted, item.ended) for item in listed] == [
        ("bbbbbb", "failed", None, 3e6, 3e6 + 10),
        ("cccccc", "running", None, 2e6, 0.0),
        ("aaaaaa", "succeeded", "first", 1e6, 1e6 + 10),
    ]
    assert {(item.world_size, item.label, item.notebook) for item in listed} == {(2, "Cell In[1]", "n.ipynb")}


def test_ended_jobs_come_from_the_cache_and_leave_with_their_directory(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make(place, "20260101-000000-aaaaaa")
    first = catalog.jobs(place)
    assert cache.load(place).keys() == {job.spec.job}
    monkeypatch.setattr(catalog, "_summarise", lambda paths: pytest.fail("read again"))
    assert catalog.jobs(place) == first
    catalog.remove(job.paths)
    assert catalog.jobs(place) == []
    assert cache.load(place) == {}
    assert list(place.jobs.iterdir()) == []


@pytest.mark.parametrize("damage", [b"this is no database" * 100, b"SQLite format 3\x00" + b"\xff" * 200, b""])
def test_a_damaged_cache_is_made_anew(place: Home, damage: bytes) -> None:
    make(place, "20260101-000000-aaaaaa")
    expected = catalog.jobs(place)
    place.catalog.write_bytes(damage)
    assert catalog.jobs(place) == expected
    assert catalog.jobs(place) == expected
    assert cache.load(place).keys() == {"20260101-000000-aaaaaa"}


def test_a_cache_of_another_version_is_made_anew(place: Home) -> None:
    make(place, "20260101-000000-aaaaaa")
    expected = catalog.jobs(place)
    with sqlite3.connect(place.catalog) as database:
        database.execute("""UPDATE jobs SET summary = '{"unknown": 1}'""")
    database.close()
    assert catalog.jobs(place) == expected
    assert catalog.jobs(place) == expected
    assert cache.load(place).keys() == {"20260101-000000-aaaaaa"}


def test_what_an_earlier_version_kept_is_read_anew_and_what_a_later_one_adds_is_passed_over(place: Home) -> None:
    for number in range(3):
        make(place, f"20260101-00000{number}-aaaaaa", state="failed")
    expected = catalog.jobs(place)
    with sqlite3.connect(place.catalog) as database:
        changed = "UPDATE jobs SET summary = json_{} WHERE job = '20260101-00000{}-aaaaaa'"
        database.execute(changed.format("remove(summary, '$.reason', '$.gpus')", 0))
        database.execute(changed.format("insert(summary, '$.later', 1)", 1))
    database.close()
    assert cache.load(place).keys() == {f"20260101-00000{number}-aaaaaa" for number in (1, 2)}
    assert catalog.jobs(place) == expected
    assert len(cache.load(place)) == 3


@pytest.mark.parametrize(
    "refusal", [sqlite3.OperationalError("disk I/O error"), sqlite3.DatabaseError("locked"), PermissionError(13, "no")]
)
def test_where_sqlite_is_refused_the_directories_are_read(
    place: Home, monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise refusal

    monkeypatch.setattr(sqlite3, "connect", refuse)
    make(place, "20260101-000000-aaaaaa")
    assert [item.state for item in catalog.jobs(place)] == ["succeeded"]
    assert catalog.find("20260101", place).job == "20260101-000000-aaaaaa"


def test_a_locked_cache_is_done_without(place: Home) -> None:
    make(place, "20260101-000000-aaaaaa")
    catalog.jobs(place)
    make(place, "20260101-000001-bbbbbb")
    other = sqlite3.connect(place.catalog, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    assert len(catalog.jobs(place)) == 2
    other.close()


def test_find_by_id_prefix_and_name(place: Home) -> None:
    make(place, "20260101-000000-aaaaaa", 1e6, name="train")
    make(place, "20260101-000001-bbbbbb", 2e6, name="train")
    make(place, "20260102-000000-cccccc", 3e6, name="20260101")
    assert catalog.find("20260101-000000-aaaaaa", place).job[-6:] == "aaaaaa"
    assert catalog.find("20260101-000001", place).job[-6:] == "bbbbbb"
    assert catalog.find("train", place).job[-6:] == "bbbbbb"
    assert catalog.find("20260101", place).job[-6:] == "cccccc"


def test_what_is_not_found_names_what_is_near(place: Home) -> None:
    make(place, "20260101-000000-aaaaaa", name="resnet-run")
    make(place, "20260101-000001-bbbbbb")
    with pytest.raises(JobNotFound, match="2 jobs begin with '2026'") as caught:
        catalog.find("2026", place)
    assert "give more" in caught.value.hint
    with pytest.raises(JobNotFound) as caught:
        catalog.find("resnet-rum", place)
    assert "did you mean resnet-run?" in caught.value.hint
    for nonsense in ("", "../..", "zzz"):
        with pytest.raises(JobNotFound):
            catalog.find(nonsense, place)


def test_a_running_job_is_not_removed(place: Home) -> None:
    with make(place, "20260101-000000-aaaaaa", state="") as job:
        with pytest.raises(StoreError, match="is running") as caught:
            catalog.remove(job.paths)
        assert f"%dist cancel {job.spec.job}" in caught.value.hint
        job.drive(DEAD)
        with pytest.raises(StoreError, match="is orphaned") as caught:
            catalog.remove(job.paths)
        assert f"%dist attach {job.spec.job}" in caught.value.hint
    assert job.paths.spec.exists()


def test_removing_what_is_not_there(place: Home) -> None:
    with pytest.raises(JobNotFound):
        catalog.remove(place.job("no-job"))


def aged(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_old_ended_jobs_and_what_only_they_named_are_collected(place: Home) -> None:
    now = time.time()
    old, new = make(place, "20260101-000000-aaaaaa", now - 1000), make(place, "20260101-000001-bbbbbb", now - 100)
    running = make(place, "20260101-000002-cccccc", now - 2000, "")
    store = blobs.BlobStore(place)
    unnamed, young = store.put(b"unnamed"), store.put(b"young")
    named = list(new.manifest.blobs)
    for blob in (unnamed, *named):
        aged(place.blob(blob.digest), 2 * catalog.YOUNG)
    collected = catalog.collect_garbage(place, max_age=500, now=now)
    running.close()
    assert (collected.jobs, collected.blobs) == ((old.spec.job,), 1)
    assert collected.size > 0
    assert not old.paths.root.exists()
    assert new.paths.root.exists()
    assert running.paths.root.exists()
    assert not place.blob(unnamed.digest).exists()
    assert place.blob(young.digest).exists()
    assert all(place.blob(blob.digest).exists() for blob in named)


def test_nothing_is_collected_without_limits(place: Home) -> None:
    job = make(place, "20260101-000000-aaaaaa")
    assert catalog.collect_garbage(place) == catalog.Collected()
    assert job.paths.root.exists()
    assert catalog.collect_garbage(Home(place.root / "none")) == catalog.Collected()


def test_the_oldest_go_until_the_rest_fits(place: Home) -> None:
    now = time.time()
    jobs = [make(place, f"20260101-00000{index}-aaaaaa", now - 1000 + index) for index in range(3)]
    for job in jobs:
        job.rank(0).prints("x" * 100_000)
    collected = catalog.collect_garbage(place, max_bytes=250_000, now=now)
    assert collected.jobs == (jobs[0].spec.job,)
    assert collected.size >= 100_000


def test_blobs_are_left_alone_while_a_job_is_created_or_cannot_be_read(place: Home) -> None:
    blob = blobs.BlobStore(place).put(b"about to be used again")
    aged(place.blob(blob.digest), 2 * catalog.YOUNG)
    with jobdir.creating(place, "20260101-000009-dddddd"):
        assert catalog.collect_garbage(place).blobs == 0
    with make(place, "20260101-000000-aaaaaa", state="") as job:
        job.paths.manifest.write_text("damaged")
        assert catalog.collect_garbage(place).blobs == 0
    assert place.blob(blob.digest).exists()


def test_what_dead_processes_left_is_collected(place: Home) -> None:
    make(place, "20260101-000000-aaaaaa")
    leftovers = [place.jobs / ".creating-x", place.jobs / ".removing-y", place.blobs / ".abc.tmp"]
    for path in leftovers[:2]:
        path.mkdir()
        (path / "spec.json").write_text("{}")
    leftovers[2].write_text("half")
    now = time.time()
    catalog.collect_garbage(place, now=now)
    assert all(path.exists() for path in leftovers)
    catalog.collect_garbage(place, now=now + 2 * catalog.YOUNG)
    assert not any(path.exists() for path in leftovers)


def test_packages_for_hosts_that_no_job_has_used_for_long_are_collected(place: Home) -> None:
    for name, age in (("old", KEPT_SECONDS + 60), ("new", 60)):
        (place.wheels / name).mkdir(parents=True)
        for file, since in (("list.json", age), ("a-1-py3-none-any.whl", 2 * KEPT_SECONDS)):
            (place.wheels / name / file).write_text("x" * 100)
            os.utime(place.wheels / name / file, (time.time() - since,) * 2)
        os.utime(place.wheels / name, (time.time() - age,) * 2)
    assert catalog.collect_garbage(place).size == 200
    assert [path.name for path in place.wheels.iterdir()] == ["new"]


def test_the_default_is_the_users_data_directory(home: Path) -> None:
    job = make(Home(home), "20260101-000000-aaaaaa")
    assert [item.job for item in catalog.jobs()] == [job.spec.job]
    assert catalog.find(job.spec.job) == job.paths
    assert catalog.collect_garbage(max_age=0.0).jobs == (job.spec.job,)


def test_a_data_directory_that_cannot_be_listed(tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("a file")
    with pytest.raises(StoreError, match="cannot be read"):
        catalog.jobs(Home(tmp_path))
