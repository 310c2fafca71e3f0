"""The tools of ``torchdist mcp``: bounded, and every wrong question answered in words."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from jupyter_torchdist.assistants import answers, tools
from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.errors import JobNotFound, TorchDistError, UserError
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.testing import FakeJob

BOUND = 128 * 1024
"""Bytes that no answer exceeds, as JSON."""


@pytest.fixture
def job() -> Iterator[FakeJob]:
    with FakeJob(ranks=3, options=Options(ranks=3, name="large"), source="x = 1\n" * 2000).running() as job:
        yield job


def size(answer: Any) -> int:
    return len(codec.dumps(codec.plain(asdict(answer))))


def test_a_log_is_read_piece_by_piece(job: FakeJob) -> None:
    text = "".join(f"{number} é\n" for number in range(20_000))
    job.rank(1).prints(text)
    found = tools.logs("large", 1, start=0, size=1001)
    pieces = [found.text]
    while found.end < found.size:
        assert f"after this: start={found.end}" in found.rest
        found = tools.logs("large", 1, start=found.end, size=10_007)
        pieces.append(found.text)
    assert "".join(pieces) == text  # no character is lost or cut in two
    end = tools.logs("large", 1)
    assert text.endswith(end.text) and 0 < len(end.text.encode()) <= tools.LOG_BYTES
    assert f"before this: start={end.start - tools.LOG_BYTES}, size={tools.LOG_BYTES}" in end.rest
    nothing = tools.logs("large", 2, "err")
    assert (nothing.text, nothing.size, nothing.rest) == ("", 0, "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"rank": 3}, "has no rank 3"),
        ({"rank": -1}, "has no rank -1"),
        ({"rank": 0, "start": -1}, "start=-1: out of rank 0 has 4 bytes"),
        ({"rank": 0, "start": 5}, "start=5: out of rank 0 has 4 bytes"),
        ({"rank": 0, "size": 0}, "size=0: an answer has 1 to 65536 bytes"),
        ({"rank": 0, "size": 2**20}, "size=1048576: an answer has 1 to 65536 bytes"),
    ],
)
def test_a_malformed_range_of_a_log(job: FakeJob, words: dict[str, Any], said: str) -> None:
    job.rank(0).prints("abc\n")
    with pytest.raises(UserError) as caught:
        tools.logs("large", **words)
    assert said in caught.value.message and caught.value.hint


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: tools.jobs(first=-1), "first=-1"),
        (lambda: tools.jobs(count=0), "count=0"),
        (lambda: tools.jobs(first=7), "there are 1 jobs, and none from 7 on"),
        (lambda: tools.ranks("large", first=3), "there are 3 ranks"),
        (lambda: tools.job("large", source_start=-1), "source_start=-1: the source has 12000 characters"),
        (lambda: tools.job("large", source_start=12_001), "source_start=12001"),
        (lambda: tools.search("large", "(", regex=True), "is not a regular expression"),
        (lambda: tools.search("large", "x", rank=9), "has no rank 9"),
        (lambda: tools.search("large", "x", at={"9.out": 1}), "there is no log 9.out"),
        (lambda: tools.curves("large", ["nothing"]), "there is no curve 'nothing'"),
        (lambda: tools.curves("large", ranks=[8]), "has no rank 8"),
        (lambda: tools.curves("large", points=3), "points=3: a curve has 16 to 4000 points"),
        (lambda: tools.curves("large", low=2, high=1), "low=2 is more than high=1"),
        (lambda: tools.curves("large", ["loss"], ranks=[0, 1, 2], points=2000), "are more than 4000"),
        (lambda: tools.plan(["--rank", "2"]), "no option --rank"),
        (lambda: tools.doctor("a b,,"), "--hosts"),
    ],
)
def test_questions_that_cannot_be_answered(job: FakeJob, call: Any, said: str) -> None:
    job.rank(0).prints("x\n").records({"t": 1.0, "k": "log", "step": 1, "v": {"loss": 1.0}})
    with pytest.raises(TorchDistError) as caught:
        call()
    assert said in caught.value.message


@pytest.mark.parametrize("tool", [tools.job, tools.ranks, tools.findings, tools.stacks, tools.curves, *tools.CONTROL])
@pytest.mark.parametrize("name", ["", "nothing", "../../etc", "/"])
def test_a_job_that_is_not_there(job: FakeJob, tool: Any, name: str) -> None:
    with pytest.raises(JobNotFound, match="there is no job"):
        tool(name)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("tool", [tools.job, tools.ranks, tools.findings, tools.stacks, tools.curves, *tools.CONTROL])
def test_a_job_of_another_user(job: FakeJob, tool: Any) -> None:
    os.chown(job.paths.root, 65534, 65534)
    with pytest.raises(UserError, match=rf"job {job.paths.job} belongs to \w+"):
        tool("large")
    os.chown(job.paths.root, 0, 0)


def test_large_jobs_give_small_answers() -> None:
    """Long texts everywhere: an answer is bounded, and says how to ask for the rest."""
    with FakeJob(ranks=120, options=Options(ranks=120, name="wide"), source="y = 2\n" * 50_000).running() as job:
        for rank in range(120):
            job.rank(rank).failed(ValueError("no good " * 20_000))
            job.rank(rank).records(
                *({"t": 1.0, "k": "log", "step": step, "v": {f"c{n}": step for n in range(30)}} for step in range(20))
            )
            job.rank(rank).prints("needle " * 5000 + "\n")
        for _ in range(200):
            job.tell("job.note", text="a long note " * 1000)
        job.ended("failed", "why " * 50_000, 0)
        page = tools.job("wide")
        assert size(page) < BOUND
        assert "115 more failures: `ranks`" in page.rest and "ask with source_start=4000" in page.rest
        assert "whole tracebacks" in page.rest and "more notes" in page.rest
        assert tools.job("wide", source_start=299_994).source == "y = 2\n"
        for answer in (tools.jobs(), tools.findings("wide"), tools.curves("wide"), tools.search("wide", "needle")):
            assert size(answer) < BOUND
        ranks = tools.ranks("wide")
        assert size(ranks) < BOUND and len(ranks.ranks) == answers.MOST == 50 and "ask with first=50" in ranks.rest
        assert [row.rank for row in tools.ranks("wide", first=100).ranks] == list(range(100, 120))


def test_a_search_goes_on_and_finds_every_line_once(job: FakeJob) -> None:
    for rank in range(3):
        job.rank(rank).prints("".join(f"rank {rank} line {number} {'x' * 600}\n" for number in range(90)))
    seen: list[tuple[int, int]] = []
    at: dict[str, int] | None = None
    while True:
        found = tools.search("large", r"line \d+ x", regex=True, at=at)
        assert len(found.hits) <= answers.MOST
        seen += [(hit.rank, hit.start) for hit in found.hits]
        at = found.at
        if at is None:
            break
        assert "ask again with at" in found.rest
    assert len(seen) == len(set(seen)) == 270
    assert tools.search("large", "nowhere").hits == () and tools.search("large", "line 3", rank=1).hits[0].rank == 1


def test_curves_are_listed_then_drawn(job: FakeJob) -> None:
    values = [math.nan if step == 3 else math.inf if step == 4 else step / 2 for step in range(1000)]
    job.rank(0).records(*({"t": 1.0, "k": "log", "step": n, "v": {"loss": v}} for n, v in enumerate(values)))
    listed = tools.curves("large")
    assert (listed.names, listed.last, listed.curves) == (("loss",), {"loss": 499.5}, ())
    drawn = tools.curves("large", ["loss"], points=20)
    (curve,) = drawn.curves
    assert len(curve.x) <= 2 * 20 and not drawn.complete and "points were merged" in drawn.rest
    (near,) = tools.curves("large", ["loss"], low=2, high=6).curves
    assert list(zip(near.x, near.y, strict=True)) == [(2, 1.0), (3, None), (4, None), (5, 2.5), (6, 3.0)]
    assert tools.curves("large", ["loss"], ranks=[0]).curves[0].rank == 0
