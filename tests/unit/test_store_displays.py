"""Rich output of the ranks, read from files that user code may have changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.errors import UserError
from jupyter_torchdist.ranks.streams.display import Display
from jupyter_torchdist.store import displays
from jupyter_torchdist.store.displays import DisplayFile
from jupyter_torchdist.testing import FakeJob


@pytest.fixture
def job() -> Iterator[FakeJob]:
    with FakeJob().running() as job:
        yield job


def found(job: FakeJob, rank: int, number: int) -> Any:
    steps = displays.find(job.paths, rank, number)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def test_the_newest_content_of_what_a_rank_displayed(job: FakeJob) -> None:
    path = job.paths.node("node0").display(1)
    path.parent.mkdir(parents=True, exist_ok=True)
    display = Display(path, lambda text: None)
    for number in range(3):
        display.write("display", {"text/plain": f"first of {number}"}, {"text/plain": {"a": number}}, f"id{number}")
    display.write("update", {"text/plain": "second of 1", "image/png": "x" * 3_000_000}, {}, "id1")
    display.write("display", {"text/plain": "@nan"}, {})
    assert found(job, 1, 1) == {"data": {"text/plain": "first of 0"}, "metadata": {"text/plain": {"a": 0}}}
    assert found(job, 1, 2)["data"] == {"text/plain": "second of 1", "image/png": "x" * 3_000_000}
    assert found(job, 1, 4)["data"] == {"text/plain": "@nan"}
    for rank, number in ((1, 5), (1, 0), (1, -1), (0, 1), (-1, 1), (10**18, 1)):
        with pytest.raises(UserError, match=f"rank {rank} has no display {number}"):
            found(job, rank, number)


def test_a_long_file_is_read_in_portions(job: FakeJob) -> None:
    bundle = {"data": {"image/png": "x" * 400_000}}
    job.rank(0).displays(*({"number": number, **bundle} for number in range(1, 31)))
    steps = displays.find(job.paths, 0, 30)
    assert sum(1 for _ in range(10) if next(steps, "end") is None) == 10


def test_lines_that_are_malformed_or_too_long_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "display"
    good = codec.dumps({"kind": "display", "number": 1, "data": {"text/plain": "x"}}).encode()
    bad = [b"", b"{", b"[]", b'{"kind":"x"}', b'{"kind":"display","data":1}', b'{"kind":"display","number":1e999}']
    path.write_bytes(b"\n".join([*bad, b"y" * 5_000_000, good, b"z" * 5_000_000, b""]) + good + b"\n")
    file = DisplayFile(path, limit=2_000_000)
    assert [record.data for record in file.read()] == [{"text/plain": "x"}] * 2
    assert file.refused >= len(bad) + 2
    assert list(file.read()) == []


def test_what_is_no_plain_file_has_no_records(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "secret").write_text('{"kind":"display"}\n')
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    for name in ("pipe", "link", "missing"):
        assert list(DisplayFile(tmp_path / name).read()) == []
