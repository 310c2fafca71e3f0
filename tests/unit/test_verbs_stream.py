"""Labelled lines: each once, none torn."""

from __future__ import annotations

import io
import re
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_torchdist.protocol.events import Finding
from jupyter_torchdist.protocol.state import JobState
from jupyter_torchdist.store import journal
from jupyter_torchdist.store.logs import LINE_LIMIT, decode, labelled
from jupyter_torchdist.testing import FakeJob
from jupyter_torchdist.verbs import ansi
from jupyter_torchdist.verbs.stream import CHUNK, Console, Lines

FEW = settings(max_examples=60, deadline=None)


def test_lines_carry_their_rank() -> None:
    assert labelled(3, "a\nb\n") == "[rank 3] a\n[rank 3] b\n"
    assert labelled(0, "\n") == "[rank 0] \n"


def test_a_line_waits_for_its_end_and_comes_once() -> None:
    with FakeJob() as job:
        lines = Lines(job.paths)
        job.rank(0).prints("whole\nhal")
        assert [(file.rank, text) for file, text in lines.poll()] == [(0, "whole\n")]
        assert list(lines.poll()) == []
        job.rank(0).prints("f\n")
        assert [text for _, text in lines.poll()] == ["half\n"]
        job.rank(1).prints("no end", "err")
        assert list(lines.poll()) == []
        assert [(file.rank, file.stream, text) for file, text in lines.drain()] == [(1, "err", "no end\n")]
        assert list(lines.drain()) == []


def test_a_character_cut_in_two_is_put_together() -> None:
    with FakeJob() as job:
        lines = Lines(job.paths)
        job.rank(0).prints("é".encode()[:1])
        assert list(lines.poll()) == []
        job.rank(0).prints("é".encode()[1:] + b"\n")
        assert [text for _, text in lines.poll()] == ["é\n"]


def test_nested_bars_come_when_they_are_over_one_line_each() -> None:
    with FakeJob() as job:
        lines = Lines(job.paths)
        job.rank(0).prints("\router: 0%\n\rinner: 0%\x1b[A", "err")
        assert list(lines.poll()) == []
        job.rank(0).prints("\n\rinner: 9%\x1b[A\n\r         \x1b[A\router: 9%\n", "err")
        assert list(lines.poll()) == []
        job.rank(0).prints("done\n", "err")
        assert [ansi.safe(text) for _, text in lines.poll()] == ["outer: 9%\ndone\n"]


def test_the_console_keeps_the_streams_apart_and_tells_how_it_ended() -> None:
    out, err = io.StringIO(), io.StringIO()
    job = FakeJob().running()
    console = Console(job.paths, out, err)
    job.rank(0).prints("hello\n")
    job.rank(1).prints("oh\x1b[2J\n", "err")
    job.tell("job.note", text="mind")
    state = _state(job)
    console.tick(state)
    assert out.getvalue() == "[rank 0] hello\n"
    assert err.getvalue() == "note: mind\n[rank 1] oh\n"
    job.rank(0).prints("last")
    job.ended("failed", "rank 1 failed", 1)
    console.tick(_state(job))
    console.finish(_state(job), job.now + 2)
    assert out.getvalue().endswith("[rank 0] last\n")
    assert "✗ failed" in err.getvalue() and "rank 1 failed" in err.getvalue()
    assert err.getvalue().count("mind") == 1


def test_who_holds_up_a_job_is_said_where_it_is_ended_at_once() -> None:
    err = io.StringIO()
    with FakeJob() as job:
        job.running()
        finding = Finding("rank-stuck", "warning", 1, "box", "rank 1 has not entered all_reduce #17", "", "Look.", ())
        job.tell("job.stalled", since=job.now - 5.0, finding=finding.to_json(), ends=True)
        job.tell("job.stopping", reason="failed")
        console = Console(job.paths, err, err)
        console.tick(_state(job))
    assert re.fullmatch(r"stalled .+: rank 1 has not entered all_reduce #17\n  → Look\.\n", err.getvalue())


def test_a_notebook_is_not_flooded() -> None:
    out = io.StringIO()
    with FakeJob() as job:
        console = Console(job.paths, out, out, limit=100)
        for _ in range(5):
            job.rank(0).prints("x" * 59 + "\n")
            console.tick(_state(job))
        assert out.getvalue().count("x" * 59) == 2
        assert out.getvalue().count("more is not shown here") == 1


@FEW
@given(data=st.binary(max_size=100) | st.text(max_size=40).map(str.encode), cuts=st.lists(st.integers(0, 100)))
def test_whatever_the_bytes_and_the_cuts_the_text_is_whole(data: bytes, cuts: list[int]) -> None:
    data = data.replace(b"\r", b"")
    with FakeJob() as job:
        lines, found = Lines(job.paths), []
        for start, end in pairwise([0, *sorted(cuts), len(data)]):
            job.rank(1).prints(data[start:end])
            found += [text for _, text in lines.poll()]
        found += [text for _, text in lines.drain()]
    assert "".join(found).removesuffix("\n") == decode(data).removesuffix("\n")


def test_ranks_that_come_later_are_followed_from_their_beginning() -> None:
    with FakeJob() as job:
        job.rank(0).prints("a\n")
        lines = Lines(job.paths, keep=0)
        assert list(lines.poll()) == []
        job.rank(1).prints("c\n", "err")
        job.rank(0).prints("b\n")
        assert sorted((log.rank, log.stream, text) for log, text in lines.poll()) == [
            (0, "out", "b\n"),
            (1, "err", "c\n"),
        ]
        assert list(lines.poll()) == []


def test_a_flood_comes_in_parts_and_none_of_it_is_lost() -> None:
    with FakeJob() as job:
        lines = Lines(job.paths)
        flood = "".join(f"{number:>99}\n" for number in range(3 * CHUNK // 100))
        bar = "\r".join(f"{number:>80}%" for number in range(4 * CHUNK // 80))
        job.rank(0).prints(flood + bar)
        first = "".join(text for _, text in lines.poll())
        assert CHUNK // 2 <= len(first) <= CHUNK + LINE_LIMIT
        rest = "".join(text for _, text in lines.drain())
    assert (first + rest).startswith(flood)
    assert (first + rest)[len(flood) :].split("\r")[-1] == bar.split("\r")[-1] + "\n"


def test_following_may_begin_near_the_end() -> None:
    with FakeJob() as job:
        job.rank(0).prints("".join(f"line {number}\n" for number in range(1000)))
        ((_, text),) = Lines(job.paths, keep=100).poll()
        assert text.endswith("line 999\n") and len(text) <= 100
        assert text.startswith("line ")


def _state(job: FakeJob) -> JobState:
    return journal.state(job.paths)
