"""Job directories: all or nothing, private, and read with damage named."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from jupyter_torchdist.protocol.errors import DamagedJob, JobNotFound, StoreError
from jupyter_torchdist.protocol.paths import Home, make_private
from jupyter_torchdist.store import files, jobdir, journal
from jupyter_torchdist.store.blobs import BlobStore
from jupyter_torchdist.testing import a_manifest, a_plan, a_spec


@pytest.fixture
def place(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def test_a_new_job_reads_back_as_it_was_written(place: Home) -> None:
    spec = a_spec(source="print('\udc80 @x')", created=1e9)
    plan = a_plan(spec)
    manifest = a_manifest(BlobStore(place), spec.job)
    paths = jobdir.create_job(place, spec, plan, manifest)
    assert (jobdir.read_spec(paths), jobdir.read_plan(paths), jobdir.read_manifest(paths)) == (spec, plan, manifest)
    state = journal.state(paths)
    assert (state.job, state.state, state.world_size, state.submitted) == (spec.job, "submitted", 2, 1e9)


def test_everything_is_private_whatever_the_mask(place: Home) -> None:
    spec = a_spec()
    before = os.umask(0)
    try:
        paths = jobdir.create_job(place, spec, a_plan(spec), a_manifest(BlobStore(place), spec.job))
    finally:
        os.umask(before)
    for path in (place.root, place.jobs, paths.root, *paths.root.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_values_of_the_environment_are_not_written(place: Home) -> None:
    spec = a_spec(options=replace(a_spec().options, env=("TOKEN=secret-value",)))
    paths = jobdir.create_job(place, spec, a_plan(spec), a_manifest(BlobStore(place), spec.job))
    assert all(b"secret-value" not in path.read_bytes() for path in paths.root.rglob("*") if path.is_file())


@pytest.mark.parametrize("failing", ["plan.json", "manifest.json", "journal.jsonl"])
def test_a_failure_leaves_nothing(place: Home, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    spec, publish = a_spec(), files.publish
    manifest = a_manifest(BlobStore(place), spec.job)

    def fail(path: Path, data: bytes) -> None:
        if path.name == failing:
            raise StoreError("the disk is full")
        publish(path, data)

    monkeypatch.setattr(files, "publish", fail)
    monkeypatch.setattr(jobdir, "publish", fail)
    with pytest.raises(StoreError):
        jobdir.create_job(place, spec, a_plan(spec), manifest)
    assert list(place.jobs.iterdir()) == []


def test_a_blob_that_is_gone_is_seen_before_anything_starts(place: Home) -> None:
    spec = a_spec()
    manifest = a_manifest(BlobStore(place), spec.job)
    place.blob(manifest.stream.digest).unlink()
    with pytest.raises(DamagedJob, match="missing"):
        jobdir.create_job(place, spec, a_plan(spec), manifest)
    assert list(place.jobs.iterdir()) == []


def test_a_draft_goes_with_its_block(place: Home) -> None:
    with jobdir.creating(place, "a-job"):
        assert place.draft("a-job").root.is_dir()
    assert list(place.jobs.iterdir()) == []


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"job": 1}', b"\xff\xfe"])
def test_damaged_files_are_named(place: Home, damage: bytes) -> None:
    spec = a_spec()
    paths = jobdir.create_job(place, spec, a_plan(spec), a_manifest(BlobStore(place), spec.job))
    for path, read in (
        (paths.spec, jobdir.read_spec),
        (paths.plan, jobdir.read_plan),
        (paths.manifest, jobdir.read_manifest),
    ):
        path.write_bytes(damage)
        with pytest.raises(DamagedJob) as caught:
            read(paths)
        assert str(path) in caught.value.message
        path.unlink()
        with pytest.raises(DamagedJob):
            read(paths)


def test_no_such_job(place: Home) -> None:
    with pytest.raises(JobNotFound, match="nothing-here"):
        jobdir.read_spec(place.job("nothing-here"))


def test_names_cannot_leave_the_data_directory(place: Home) -> None:
    for name in ("../x", "", ".hidden", "a/b", "x" * 200):
        with pytest.raises(ValueError, match="cannot name a file"):
            place.job(name)


@pytest.mark.parametrize("mask", [0o000, 0o022])
def test_no_parent_of_the_data_directory_is_open_to_others(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        make_private(tmp_path / "a" / "b" / "home")
    finally:
        os.umask(before)
    for folder in ("a", "a/b", "a/b/home"):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700
