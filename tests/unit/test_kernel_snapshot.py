"""The picture of a job: bounded, escaped, complete."""

from __future__ import annotations

import html
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_torchdist.kernel.snapshot import BYTES, Progress, Snapshot, as_html, as_text
from jupyter_torchdist.protocol.events import ErrorRecord
from jupyter_torchdist.protocol.state import JobState, RankState


def job(world: int = 2, state: str = "running") -> JobState:
    ranks = {number: RankState(number, "n0", "box", 7, "running") for number in range(world)}
    return JobState("20260102-030405-abcdef", "digits", "Cell In[3]", state, world, 100.0, ranks=ranks)


def test_everything_is_in_both_forms() -> None:
    snapshot = Snapshot(
        replace(job(), notes=("large data",)),
        104.0,
        {0: ["epoch 1"], 1: ["\x1b[32mepoch 1\x1b[0m"]},
        {"loss": 0.12345, "acc": float("nan")},
        Progress(30, 120, "train"),
        ("stayed behind: f (an open file)",),
    )
    for text in (as_text(snapshot), html.unescape(re.sub("<[^>]*>", "", as_html(snapshot)))):
        for part in (
            "digits (20260102-030405-abcdef)",
            "running · 2 ranks on box · 4.0 s",
            "train 30 of 120 (25 %)",
            "loss 0.1235 · acc nan",
            "[rank 0] epoch 1",
            "[rank 1] epoch 1",
            "large data",
            "stayed behind: f (an open file)",
        ):
            assert part in text
    assert '<progress value="30" max="120">' in as_html(snapshot)
    assert "color:#00a250" in as_html(snapshot)


def test_a_failure_is_named_with_the_ranks_it_stopped() -> None:
    state = job(4, "failed")
    record = ErrorRecord("ValueError", "builtins", "bad <b>", "…", (), 1.0)
    state = replace(state, ranks={**state.ranks, 2: replace(state.ranks[2], state="failed", error=record)})
    text = as_text(Snapshot(state, 101.0))
    assert "rank 2 on box failed: ValueError: bad <b>\n3 other ranks were stopped because of this" in text
    assert "bad &lt;b&gt;" in as_html(Snapshot(state, 101.0))


def test_a_failed_rank_is_among_those_shown() -> None:
    state = job(100, "failed")
    record = ErrorRecord("ValueError", "builtins", "bad", "…", (), 1.0)
    state = replace(state, ranks={**state.ranks, 97: replace(state.ranks[97], state="failed", error=record)})
    text = as_text(Snapshot(state, 101.0, {rank: ["line"] for rank in range(100)}))
    assert "[rank 97] line" in text
    assert "72 more ranks: %dist logs 20260102-030405-abcdef --rank N" in text


@pytest.mark.parametrize("line", ["x" * 100_000, "<&>" * 500, "\x1b[31m" * 5000 + "x", "漢" * 4000, "\x00\x1b]0;" * 99])
@pytest.mark.parametrize("world", [1, 2, 64, 1024])
def test_it_is_bounded_whatever_is_printed(line: str, world: int) -> None:
    snapshot = Snapshot(
        replace(job(world), notes=(line,) * 50, name=line[:100]),
        1.0,
        {rank: [line] * 100 for rank in range(world)},
        {f"{line[:300]}{index}": 1.0 for index in range(50)},
        Progress(1, 2, line[:200]),
        (line,) * 5,
    )
    assert len(as_html(snapshot).encode()) <= BYTES
    assert as_text(snapshot).count("\n") < 45


@given(st.text(max_size=80))
def test_no_line_can_leave_its_place(line: str) -> None:
    page = as_html(Snapshot(replace(job(), name=line), 1.0, {0: [line]}, {line: 1.0}, Progress(1, 2, line), (line,)))
    tags = re.findall(r"<(/?\w+)", page)
    assert set(tags) <= {"div", "/div", "b", "/b", "span", "/span", "pre", "/pre", "progress", "/progress"}
