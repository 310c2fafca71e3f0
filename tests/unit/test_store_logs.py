"""Logs: any bytes, any size, never torn inside a character, in bounded memory."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import settings

from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.store import logs
from jupyter_torchdist.testing import FakeJob

FEW = settings(max_examples=50, deadline=None)


@pytest.fixture
def job(tmp_path: Path) -> FakeJob:
    job = FakeJob(Home(tmp_path / "home"), ranks=3, nodes=2)
    job.close()
    return job


def test_files_are_found_by_rank_and_stream_on_all_nodes(job: FakeJob) -> None:
    assert logs.files(job.paths) == []
    job.rank(2).prints("c")
    job.rank(0).prints("e", "err").prints("a")
    job.rank(1).records({"loss": 1})
    found = [(file.rank, file.stream, file.node) for file in logs.files(job.paths)]
    assert found == [(0, "out", "node0"), (0, "err", "node0"), (2, "out", "node1")]
    assert [file.stream for file in logs.files(job.paths, 0, "err")] == ["err"]
    assert logs.files(job.paths, 1) == []


@pytest.mark.parametrize("text", ["", "a", "a\n", "a\nb", "\n\n", "é\n€\n😀", "1\r2\r3\n", "form\x0cfeed\u2028x\ny"])
@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_tail_is_the_last_lines(tmp_path: Path, text: str, count: int) -> None:
    path = tmp_path / "log"
    path.write_bytes(text.encode())
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    assert logs.tail(path, count) == "".join(lines[len(lines) - min(count, len(lines)) :])


def test_tail_of_a_line_without_end_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes("€".encode() * 1_000_000)
    text = logs.tail(path, 5, limit=100_000)
    assert set(text) == {"€"}
    assert 33_000 <= len(text) <= 33_334


def test_tail_crosses_blocks(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = [f"line {number} {'x' * 100}\n" for number in range(5000)]
    path.write_text("".join(lines))
    assert logs.tail(path, 3000) == "".join(lines[-3000:])


def test_a_missing_log_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "none"
    assert (logs.tail(path, 5), list(logs.lines(path)), list(logs.grep(path, "x"))) == ("", [], [])


def test_grep_numbers_lines_and_matches_inside_them(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo \xff\n\nthree\nfour")
    assert list(logs.grep(path, r"t[wh]")) == [(2, r"two \xff"), (4, "three")]
    assert list(logs.grep(path, re.compile("FOUR", re.IGNORECASE))) == [(5, "four")]
    assert list(logs.grep(path, "^$")) == [(3, "")]
    with pytest.raises(re.error):
        list(logs.grep(path, "("))


def test_a_line_of_a_hundred_megabytes_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with open(path, "wb") as file:
        file.write(b"first\n")
        file.truncate(100_000_000)
        file.seek(0, 2)
        file.write(b"needle\nlast\n")
    tracemalloc.start()
    found = list(logs.grep(path, "needle|last"))
    end = logs.tail(path, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(number, line[-6:]) for number, line in found] == [(2, "needle"), (3, "last")]
    assert end == "last\n"
    assert peak < 3_000_000


def test_last_words_are_without_stacks_and_logging(tmp_path: Path) -> None:
    log = tmp_path / "launcher.log"
    log.write_text(
        "first\nsecond\nthe files of rank 0 cannot be made: the disk is full\n"
        "W 2026-11-27 22:26:23,201 torch.multiprocessing.spawn] Terminating process 22674 via signal SIGTERM\n"
        'Traceback (most recent call last):\n  File "x.py", line 3, in poll\n    join()\n'
        "\nDuring handling of the above exception, another exception occurred:\n\n"
        'Traceback (most recent call last):\n  File "x.py", line 9, in run\n    raise\n'
        "ProcessExitedException: process 0 terminated with exit code 1\n"
    )
    assert logs.last_words(log).splitlines() == [
        "second",
        "the files of rank 0 cannot be made: the disk is full",
        "ProcessExitedException: process 0 terminated with exit code 1",
    ]
    assert logs.last_words(tmp_path / "none") == ""
