"""The journal: appended by one, read by many at their own offsets, survived when damaged."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jupyter_torchdist.protocol.errors import JobNotFound, StoreError
from jupyter_torchdist.protocol.events import Event
from jupyter_torchdist.protocol.paths import Home, JobPaths
from jupyter_torchdist.store import journal
from jupyter_torchdist.testing import FakeJob

FEW = settings(max_examples=50, deadline=None)


@pytest.fixture
def job(tmp_path: Path) -> FakeJob:
    job = FakeJob(Home(tmp_path / "home"))
    job.running()
    job.close()
    return job


def test_events_are_numbered_across_writers(job: FakeJob) -> None:
    events, end = journal.read(job.paths)
    known: list[Event] = []
    with journal.Writer(job.paths, known.append) as writer:
        assert known == events
        assert writer.append(Event("job.note", 5.0, data={"text": "on"})).seq == events[-1].seq + 1
    more, _ = journal.read(job.paths, end)
    assert [event.data for event in more] == [{"text": "on"}]
    assert [event.seq for event in events + more] == list(range(1, len(events) + 2))


def test_a_torn_last_line_is_cut_off(job: FakeJob) -> None:
    events, end = journal.read(job.paths)
    with open(job.paths.journal, "ab") as file:
        file.write(b'{"seq":99,"kind":"job.no')
    assert journal.read(job.paths) == (events, end)
    with journal.Writer(job.paths) as writer:
        writer.append(Event("job.note", 5.0, data={"text": "whole"}))
    assert journal.read(job.paths)[0][-1].data == {"text": "whole"}
    assert journal.read(job.paths)[0][-1].seq == events[-1].seq + 1


@FEW
@example(cut=168, garbage=b" ", at=73)  # a field's name is another one
@example(cut=168, garbage=b" ", at=77)  # the job's name is another one
@given(cut=st.integers(0, 2000), garbage=st.binary(max_size=50), at=st.integers(0, 2000))
def test_any_damage_is_survived(tmp_path_factory: pytest.TempPathFactory, cut: int, garbage: bytes, at: int) -> None:
    job = FakeJob(Home(tmp_path_factory.mktemp("home")))
    job.running().close()
    data = job.paths.journal.read_bytes()[:cut]
    job.paths.journal.write_bytes(data[:at] + garbage + data[at:])
    state = journal.state(job.paths)
    assert state.job == job.spec.job
    with journal.Writer(job.paths) as writer:
        writer.append(Event("job.note", 5.0, data={"text": "after"}))
    assert journal.read(job.paths)[0][-1].data == {"text": "after"}


def test_readers_meet_only_whole_lines(job: FakeJob) -> None:
    data = job.paths.journal.read_bytes()
    job.paths.journal.write_bytes(b"")
    offset, seen = 0, []
    for byte in data:
        with open(job.paths.journal, "ab") as file:
            file.write(bytes([byte]))
        events, offset = journal.read(job.paths, offset)
        seen += events
    assert (seen, offset) == (journal.read(job.paths)[0], len(data))


def test_a_missing_or_shortened_journal_gives_nothing(job: FakeJob) -> None:
    assert journal.read(job.paths, 10**9) == ([], job.paths.journal.stat().st_size)
    job.paths.journal.unlink()
    assert journal.read(job.paths, 50) == ([], 0)
    assert journal.state(job.paths).state == "submitted"


def test_an_append_that_fails_leaves_no_part(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    write, before = os.write, job.paths.journal.read_bytes()

    def half(fd: int, data: memoryview) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[: len(data) // 2])

    with journal.Writer(job.paths) as writer:
        seq = writer.seq
        monkeypatch.setattr(os, "write", half)
        with pytest.raises(StoreError, match="full"):
            writer.append(Event("job.note", 1.0, data={"text": "x" * 500}))
        monkeypatch.undo()
        assert job.paths.journal.read_bytes() == before
        assert writer.append(Event("job.note", 1.0)).seq == seq + 1


def test_the_summary_is_the_final_word(job: FakeJob) -> None:
    with journal.Writer(job.paths) as writer:
        writer.append(Event("job.ended", 9.0, data={"state": "failed", "reason": "why", "first_failure": 1}))
    state = journal.state(job.paths)
    assert (state.state, state.first_failure) == ("failed", 1)
    journal.publish_summary(job.paths, state)
    job.paths.journal.unlink()
    assert journal.state(job.paths) == state


@pytest.mark.parametrize("damage", [b"", b"null", b"{}", b'{"ranks": 5}', b"\x00\xff"])
def test_a_damaged_summary_is_no_summary(job: FakeJob, damage: bytes) -> None:
    job.paths.summary.write_bytes(damage)
    assert journal.state(job.paths).state == "running"


def test_a_directory_without_any_file_is_still_a_job(job: FakeJob) -> None:
    for path in job.paths.root.glob("*.json*"):
        path.unlink()
    assert journal.state(job.paths).job == job.spec.job


def test_no_such_job(tmp_path: Path) -> None:
    with pytest.raises(JobNotFound):
        journal.state(JobPaths(tmp_path / "no-job"))


def test_a_journal_that_is_a_directory_cannot_be_read(job: FakeJob) -> None:
    job.paths.journal.unlink()
    job.paths.journal.mkdir()
    with pytest.raises(StoreError, match="cannot be read"):
        journal.read(job.paths)


def test_two_closes_are_one(job: FakeJob) -> None:
    writer = journal.Writer(job.paths)
    writer.close()
    writer.close()
