"""The picture of a job: bounded, escaped, complete."""

from __future__ import annotations

import base64
import html
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_torchdist.feed.curveindex import NAMES
from jupyter_torchdist.kernel.curves import POINTS, Curves
from jupyter_torchdist.kernel.picture import Trace
from jupyter_torchdist.kernel.snapshot import BYTES, CURVES, Line, Progress, Snapshot, as_html, as_text
from jupyter_torchdist.protocol.events import ErrorRecord
from jupyter_torchdist.protocol.state import JobState, RankState, Waiting
from jupyter_torchdist.testing import FakeJob


def job(world: int = 2, state: str = "running") -> JobState:
    ranks = {number: RankState(number, "n0", "box", 7, "running") for number in range(world)}
    return JobState("20260102-030405-abcdef", "digits", "Cell In[3]", state, world, 100.0, ranks=ranks)


def said(*lines: str) -> list[Line]:
    """One line a second."""
    return [(float(second), line) for second, line in enumerate(lines)]


def test_everything_is_in_both_forms() -> None:
    snapshot = Snapshot(
        replace(job(), notes=("large data",)),
        104.0,
        {0: said("epoch 1"), 1: said("\x1b[32mepoch 1\x1b[0m")},
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


def test_lines_of_all_ranks_are_in_order_of_time() -> None:
    text = as_text(Snapshot(job(), 104.0, {0: [(1.0, "one"), (3.0, "three")], 1: [(2.0, "two")]}))
    assert re.findall("one|two|three", text) == ["one", "two", "three"]


def test_the_value_above_a_curve_is_the_end_of_its_line() -> None:
    trace = course((0, 1.0), (1, 0.25))
    for text in (as_text, as_html):
        shown = text(Snapshot(job(), 1.0, curves={"loss": 7.0}, traces={"loss": trace}))
        assert "0.25" in shown and "7.0" not in shown


def test_what_ranks_wait_for_is_said() -> None:
    state = job()
    state.ranks[0] = replace(state.ranks[0], waiting=Waiting("all_reduce", "gloo:0", 17, 102.0))
    for text in (as_text(Snapshot(state, 104.0)), as_html(Snapshot(state, 104.0))):
        assert "rank 0 waits in all_reduce #17, for 2.0 s" in text


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
    text = as_text(Snapshot(state, 101.0, {rank: said(f"line of {rank}") for rank in range(100)}))
    assert "[rank 97] line of 97" in text
    assert "72 more ranks: %dist logs 20260102-030405-abcdef --rank N" in text


def test_ranks_that_said_the_same_are_one_voice() -> None:
    lines = {rank: said("epoch 1", "done") for rank in range(8)}
    text = as_text(Snapshot(job(8), 1.0, lines))
    assert text.endswith("[ranks 0–7] epoch 1\n[ranks 0–7] done")
    text = as_text(Snapshot(job(8), 1.0, {**lines, 3: said("epoch 1", "saved")}))
    assert text.endswith("[ranks 0–2, 4–7] epoch 1\n[rank 3] epoch 1\n[ranks 0–2, 4–7] done\n[rank 3] saved")
    page = as_html(Snapshot(job(64), 1.0, {rank: said("same") for rank in range(64)}))
    assert page.count("same") == 1 and "[ranks 0–63]" in page and "more rank" not in page


WIDEST = Trace(tuple(float(x) for x in range(-POINTS, 0)), *[tuple((-1.0) ** x * 1e308 for x in range(POINTS))] * 3)


@pytest.mark.parametrize("line", ["x" * 100_000, "<&>" * 500, "\x1b[31m" * 5000 + "x", "漢" * 4000, "\x00\x1b]0;" * 99])
@pytest.mark.parametrize("world", [1, 2, 64, 1024])
def test_it_is_bounded_whatever_is_printed(line: str, world: int) -> None:
    snapshot = Snapshot(
        replace(job(world, "failed"), notes=(line,) * 50, name=line, reason=line),
        1.0,
        {rank: said(*[f"{rank}{line}"] * 100) for rank in range(world)},
        {f"{line[:300]}{index}": 1.0 for index in range(50)},
        Progress(1, 2, line),
        (line,) * 5000,
        {f"{line[:300]}{index}": WIDEST for index in range(50)},
    )
    forms = {"text/html": as_html(snapshot), "text/plain": as_text(snapshot)}
    assert len(json.dumps(forms, ensure_ascii=False).encode()) <= 300_000, "as a notebook stores it"
    assert len(forms["text/html"].encode()) <= BYTES
    assert forms["text/plain"].count("\n") < 50


@given(st.text(max_size=80))
def test_no_line_can_leave_its_place(line: str) -> None:
    traces = {line: WIDEST}
    page = as_html(
        Snapshot(replace(job(), name=line), 1.0, {0: said(line)}, {line: 1.0}, Progress(1, 2, line), (line,), traces)
    )
    tags = set(re.findall(r"</?(\w+)", page))
    assert tags <= {"div", "b", "span", "pre", "progress", "small", "img"}


def course(*points: tuple[float, float]) -> Trace:
    """As the picture draws it of these points, logged by one rank."""
    with FakeJob().running() as fake:
        fake.rank(0).records(*({"t": 1, "k": "log", "step": x, "v": {"x": value}} for x, value in points))
        curves = Curves(fake.paths)
        curves.read_to_end()
        return curves.traces["x"]


def drawn(page: str) -> list[tuple[str, str]]:
    """The paths of a drawing: what fills them, and where they go."""
    data = re.search('src="data:image/svg[+]xml;base64,([^"]*)"', page)
    assert data
    drawing = ElementTree.fromstring(base64.b64decode(data[1]))
    paths = drawing.findall("{http://www.w3.org/2000/svg}path")
    return [(path.get("fill", ""), path.get("d", "")) for path in paths if path.get("d")]


def test_a_gap_in_a_curve_is_left_open() -> None:
    trace = course(*((float(x), math.nan if x in (3, 4, 6) else 1.0 + x) for x in range(10)))
    page = as_html(Snapshot(job(), 1.0, curves={"loss": 1.0}, traces={"loss": trace}))
    line = next(path for fill, path in drawn(page) if fill == "none")
    assert [part.count(",") for part in line.split("M")[1:]] == [3, 2, 3]  # the one in the middle is a dot
    assert "1 to 10, steps 0 to 9" in page
    assert "loss nan" in as_html(Snapshot(job(), 1.0, traces={"loss": course((0, 1), (1, 2), (2, math.nan))}))


def test_a_curve_is_drawn_within_its_frame_and_named_outside_of_it() -> None:
    trace = course(*((float(x), math.sin(x)) for x in range(1000)))
    assert len(trace.x) <= POINTS and min(trace.low) < -0.99 and max(trace.high) > 0.99
    page = as_html(Snapshot(job(), 1.0, curves={"loss": 0.5, "lr": 0.1}, traces={"loss": trace}))
    for _, path in drawn(page):
        assert len(path) > 50
        for point in re.findall(r"[\d.-]+,[\d.-]+", path):
            x, y = map(float, point.split(","))
            assert 0 <= x <= 220 and 0 <= y <= 64
    words = re.sub("<[^>]*>", " ", page)
    assert f"loss {trace.mean[-1]:.4g}" in words and "loss 0.5" not in words
    assert "lr 0.1" in words and "-1 to 1, steps 0 to 999" in words


def test_without_its_styles_the_picture_still_tells_everything() -> None:
    state = replace(job(2, "failed"), reason="rank 1 on box failed: ValueError: bad")
    page = as_html(Snapshot(state, 1.0, {0: said("fine"), 1: said("\x1b[31mbad\x1b[0m")}, {"loss": 1.0}))
    bare = re.sub(r' style="[^"]*"', "", page)
    assert "✗ failed" in bare and "[rank 1] " in re.sub("<[^>]*>", "", bare) and "loss 1" in bare


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(-1e15, 1e15), st.floats(allow_nan=False, allow_infinity=False)),
        min_size=2,
        unique_by=lambda at: at[0],
    )
)
def test_a_course_is_bounded_and_keeps_its_extremes(points: list[tuple[float, float]]) -> None:
    trace = course(*points)
    assert len(trace.x) <= POINTS and list(trace.x) == sorted(trace.x)
    assert min(trace.low) == min(value for _, value in points)
    assert max(trace.high) == max(value for _, value in points)
    for low, mean, high in zip(trace.low, trace.mean, trace.high, strict=True):
        assert math.isfinite(mean) and (low <= mean or math.isclose(low, mean)) and (mean <= high or mean / high > 0.99)
    as_html(Snapshot(job(), 1.0, curves={"x": 1.0}, traces={"x": trace}))


def test_odd_metrics_are_taken_as_they_are() -> None:
    with FakeJob().running() as fake:
        odd = ["text", None, [1], math.nan, math.inf, -math.inf, 1e308, -1e308, 10**400, True]
        records = [{"t": 1, "k": "log", "step": step, "v": {"odd": value}} for step, value in enumerate(odd)]
        fake.rank(0).records(
            *records,
            {"t": 1, "k": "log", "step": -5, "v": {"odd": 0.5}},
            {"t": 1, "k": "log", "step": 10**30, "v": {"far": 0.5}},
            {"t": 1, "k": "log", "step": "three", "v": "none"},
            {"t": 1, "k": "progress", "n": "many", "total": [], "desc": 3},
            *({"t": 1, "k": "log", "v": {f"name {number}": 1.0}} for number in range(2 * NAMES)),
        )
        curves = Curves(fake.paths)
        curves.read_to_end()
        assert len(curves.last) == NAMES and len(curves.traces) <= CURVES
        trace = curves.traces["odd"]
        kept = [x for x, mean in zip(trace.x, trace.mean, strict=True) if math.isfinite(mean)]
        assert kept == [-5.0, 5.0, 7.0, 9.0] and max(filter(math.isfinite, trace.high)) == 1e308
        page = as_html(Snapshot(job(), 1.0, curves=curves.last, traces=curves.traces, progress=curves.progress))
        assert len(page) <= BYTES and "nan" not in page.replace("name", "")
