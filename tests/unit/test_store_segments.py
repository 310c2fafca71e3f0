"""Logs as segments: nothing lost, nothing twice, whatever the bytes and however they come."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jupyter_torchdist.feed import history
from jupyter_torchdist.protocol.feed import FIRST_BYTES, LINE_LIMIT, MESSAGE_BYTES, Older, Segment
from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.protocol.times import RECORD
from jupyter_torchdist.store import segments, tail
from jupyter_torchdist.store.logs import decode
from jupyter_torchdist.store.tail import LAG, Tail
from jupyter_torchdist.testing import FakeJob

FEW = settings(max_examples=60, deadline=None)
TEXTS = ("", "\n", "a\n", "\r 10%", "é", "€\n", "😀", "\0", "x" * 3000, "y" * 70_000)
DAMAGED = (b"\xff\xfe", b"\x80\x80\x80\x80\x80", b"\xf0\x9f", b"\xe2\x82")
PIECES = [*(text.encode() for text in TEXTS), *DAMAGED]
CHUNK = st.lists(st.integers(0, len(PIECES) - 1), max_size=30)
"""Pieces by their number: the bytes of a failing case would fill pages."""


def data_of(chunk: list[int]) -> bytes:
    return b"".join(PIECES[number] for number in chunk)


@pytest.fixture
def job(tmp_path: Path) -> FakeJob:
    job = FakeJob(Home(tmp_path / "home"), ranks=3, nodes=2)
    job.close()
    return job


def times(job: FakeJob, rank: int, records: list[tuple[float, int]]) -> None:
    path = job.rank(rank).files.times(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(RECORD.pack(t, size) for t, size in records))


def read_all(follow: Tail, job: FakeJob, now: float = 0.0, ended: bool = True) -> list[segments.Segment]:
    found: list[segments.Segment] = []
    while True:
        logs = segments.find(job.paths)
        sizes = {name: log.size() for name, log in logs.items()}
        more = follow.poll(logs, sizes, now, MESSAGE_BYTES, ended)
        if not more:
            return found
        assert sum(len(segment.data) for segment in more) <= MESSAGE_BYTES + LINE_LIMIT
        found += more


@FEW
@given(st.lists(CHUNK, max_size=8))
def test_any_chunks_give_the_same_text(tmp_path_factory: pytest.TempPathFactory, chunks: list[list[int]]) -> None:
    job = FakeJob(Home(tmp_path_factory.mktemp("home")), ranks=1)
    job.close()
    follow, found = Tail({"0.out": 0}), []
    for number, chunk in enumerate(chunks):
        job.rank(0).prints(data_of(chunk))
        found += read_all(follow, job, float(number), ended=False)
    found += read_all(follow, job, 1e9)
    whole = b"".join(map(data_of, chunks))
    same = b"".join(segment.data for segment in found) == whole
    alike = "".join(segment.to_json()["text"] for segment in found) == decode(whole)
    assert same and alike
    place = 0
    for segment in found:
        assert (segment.start, len(segment.data)) == (place, segment.end - segment.start)
        place = segment.end
        assert len(segment.data) <= LINE_LIMIT or segment.data.count(b"\n") > 0


@FEW
@given(CHUNK, st.lists(st.integers(0, 100), max_size=6), st.integers(1, 200_000))
def test_read_backwards_it_is_the_same_text(
    tmp_path_factory: pytest.TempPathFactory, chunk: list[int], marks: list[int], limit: int
) -> None:
    job = FakeJob(Home(tmp_path_factory.mktemp("home")), ranks=1)
    job.close()
    data = data_of(chunk)
    job.rank(0).prints(data)
    times(job, 0, [(float(n), len(data) * mark // 100) for n, mark in enumerate(sorted(marks))])
    logs = segments.find(job.paths)
    at: dict[str, int] = {}
    found: list[Segment] = []
    while not at or at["0.out"] > 0:
        answer = history.older(logs, at, [], limit)
        assert answer["segments"] or answer["at"]["0.out"] == 0
        found[:0] = answer["segments"]
        at = answer["at"]
    same = "".join(str(segment["text"]) for segment in found) == decode(data)
    assert same


@given(st.binary(max_size=40), st.integers(0, 40))
@example(b"\xc2\x80", 1)
def test_a_cut_between_characters_changes_no_text(data: bytes, at: int) -> None:
    place = segments.boundary(data, at)
    assert place <= max(at, len(data))
    assert decode(data[:place]) + decode(data[place:]) == decode(data)


def test_ranks_are_merged_by_time(job: FakeJob) -> None:
    job.rank(0).prints("a0\na1\na2\n")
    job.rank(2).prints("b0\nb1\n")
    times(job, 0, [(10.0, 3), (20.0, 6), (30.0, 9)])
    times(job, 2, [(15.0, 3), (25.0, 6)])
    found = read_all(Tail({}), job)
    assert [segment.data for segment in found] == [b"a0\n", b"b0\n", b"a1\n", b"b1\n", b"a2\n"]
    assert [segment.t for segment in found] == [10.0, 15.0, 20.0, 25.0, 30.0]
    back = history.older(segments.find(job.paths), {}, [], 7)
    assert [segment["text"] for segment in back["segments"]] == ["a1\n", "b1\n", "a2\n"]
    rest = history.older(segments.find(job.paths), back["at"], [], 1000)
    assert [segment["text"] for segment in rest["segments"]] == ["a0\n", "b0\n"]
    assert set(rest["at"].values()) == {0}
    only = history.older(segments.find(job.paths), {}, ["2.out"], 1000)
    assert only["at"] == {"2.out": 0}


def test_a_line_waits_for_its_end_but_not_for_long(job: FakeJob) -> None:
    job.rank(0).prints("whole\nhalf 😀"[:-1] + "").prints("😀".encode()[:2])
    follow = Tail({})
    assert [segment.data for segment in read_all(follow, job, 1.0, ended=False)] == [b"whole\n"]
    assert read_all(follow, job, 1.1, ended=False) == []
    assert [segment.data for segment in read_all(follow, job, 1.0 + tail.PATIENCE, ended=False)] == [b"half "]
    job.rank(0).prints("😀".encode()[2:] + b"\n")
    assert [segment.data for segment in read_all(follow, job, 2.0, ended=False)] == ["😀\n".encode()]


def test_a_view_goes_on_where_it_was(job: FakeJob) -> None:
    job.rank(0).prints("one\ntwo\n").prints("e\n", "err")
    found = read_all(Tail({"0.out": 4, "0.err": 99, "7.out": 5}), job)
    assert [(segment.log.name, segment.data) for segment in found] == [("0.out", b"two\n")]


def test_a_view_in_the_middle_begins_near_the_end(job: FakeJob) -> None:
    job.rank(0).prints(b"".join(b"line %07d\n" % number for number in range(100_000)))
    found = read_all(Tail({}), job)
    assert found[0].start % 13 == 0
    assert FIRST_BYTES - 13 <= found[-1].end - found[0].start <= FIRST_BYTES
    assert found[-1].end == 1_300_000


def test_a_slow_view_is_never_far_behind(job: FakeJob) -> None:
    follow = Tail({"0.out": 0})
    for _ in range(10):
        job.rank(0).prints(b"z" * 99 + b"\n" + b"x" * 999_899 + b"\n")
        logs = segments.find(job.paths)
        sizes = {name: log.size() for name, log in logs.items()}
        taken = follow.poll(logs, sizes, 0.0, MESSAGE_BYTES, False)
        assert taken
        assert follow.behind(sizes) <= LAG


def test_lines_of_hundred_megabytes_stay_small(job: FakeJob) -> None:
    path = job.rank(0).files.out(0)
    path.parent.mkdir(parents=True)
    with open(path, "wb") as file:
        file.truncate(100_000_000)  # NUL bytes without an end
    found = read_all(Tail({}), job)
    assert all(len(segment.data) <= LINE_LIMIT for segment in found)
    answer = history.older(segments.find(job.paths), {}, [], 300_000)
    assert 300_000 <= sum(len(segment["text"]) for segment in answer["segments"]) <= 300_000 + LINE_LIMIT
    near = history.around(segments.find(job.paths)["0.out"], 50_000_000, 100_000)["segments"]
    assert near[0]["start"] <= 50_000_000 < near[-1]["end"]


@pytest.mark.parametrize("offset", [0, 5, 40_000, 99_990, 10**12])
def test_around_a_place_are_its_lines(job: FakeJob, offset: int) -> None:
    job.rank(0).prints(b"".join(b"line %04d\n" % number for number in range(10_000)))
    found = history.around(segments.find(job.paths)["0.out"], offset, 5000)["segments"]
    place = min(offset, 99_999)
    assert found[0]["start"] <= place < found[-1]["end"]
    assert found[0]["start"] % 10 == 0
    assert 4000 <= found[-1]["end"] - found[0]["start"] <= 6000 + LINE_LIMIT


def test_a_file_that_is_gone_is_empty(job: FakeJob) -> None:
    job.rank(0).prints("a\n")
    logs = segments.find(job.paths)
    os.unlink(logs["0.out"].path)
    older: Older = {"segments": [], "at": {"0.out": 0}}
    assert history.older(logs, {"0.out": 2}, [], 100) == older
    assert history.around(logs["0.out"], 1, 100)["segments"] == []
