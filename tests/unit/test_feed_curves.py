"""Curves: bounded, no minimum or maximum lost, and no value that does harm."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_torchdist.feed import curveindex, curves, status
from jupyter_torchdist.feed.bins import MOST, Bins, Rows, number
from jupyter_torchdist.feed.curveindex import CurveIndex
from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.errors import UserError
from jupyter_torchdist.protocol.feed import CurvesAsked
from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.testing import FakeJob
from tests.curves import answer_of

FEW = settings(max_examples=60, deadline=None)


@pytest.fixture
def job(tmp_path: Path) -> FakeJob:
    job = FakeJob(Home(tmp_path / "home"), ranks=3)
    job.close()
    return job


def log(values: dict[str, Any], step: Any = None, t: float = 1.0) -> dict[str, Any]:
    return {"t": t, "k": "log", "step": step, "v": values}


def index_of(job: FakeJob) -> CurveIndex:
    index = CurveIndex.of(job.paths)
    index.look()
    while not index.advance(1.0):
        pass
    return index


def ask(job: FakeJob, **words: Any) -> dict[str, Any]:
    question = CurvesAsked.from_json({"mode": "ranks", **words})
    return answer_of(curves.answer(index_of(job), question))


def series(job: FakeJob, **words: Any) -> dict[str, Any]:
    (only,) = ask(job, **words)["series"]
    return dict(only)


def test_points_come_as_they_were_logged(job: FakeJob) -> None:
    job.rank(1).records(log({"loss": 3, "lr": 0.5}, 10, 100.0), log({"loss": 2, "lr": 0.25}, 20, 101.5))
    answer = ask(job)
    assert (answer["version"], answer["complete"]) == (2, True)
    assert answer["series"][0] == {"name": "loss", "rank": 1, "x": [10, 20], "y": [3, 2], "low": [3, 2], "high": [3, 2]}
    assert series(job, names=["lr", "unknown"], x="time")["x"] == [100.0, 101.5]
    assert series(job, names=["lr"], low=15, high=99)["y"] == [0.25]
    assert ask(job, names=["lr"], ranks=[0])["series"] == []
    assert ask(job, low=500, high=600)["series"] == []


def test_only_what_is_new_is_read_and_feeds_share_it(job: FakeJob) -> None:
    job.rank(0).records(log({"loss": 1}, 0))
    first = index_of(job)
    job.rank(0)._append(job.rank(0).files.metrics(0), json.dumps(log({"loss": 2}, 1)).encode())
    assert index_of(job) is first
    assert first.version == 1
    job.rank(0)._append(job.rank(0).files.metrics(0), b"\n")
    assert index_of(job).version == 2


@FEW
@given(
    st.lists(
        st.tuples(
            st.integers(-5, 200),
            st.one_of(
                st.floats(width=64), st.integers(-(10**400), 10**400), st.sampled_from(["text", None, [1], True])
            ),
        ),
        max_size=300,
    ),
    st.integers(2, 20),
    st.integers(1, 50),
)
def test_minimum_and_maximum_are_never_lost(rows: list[tuple[int, Any]], most: int, chunk: int) -> None:
    bins = Bins(("a", "b"))
    values = [json.loads(codec.dumps(value)) for _, value in rows]
    for begin in range(0, len(rows), chunk):
        part = values[begin : begin + chunk]
        steps = [float(step) for step, _ in rows[begin : begin + chunk]]
        bins.add(
            Rows(steps, list(steps), list(range(begin, begin + len(part))), [(value, 1.0) for value in part]), most
        )
    finite = [value for value in map(number, values) if math.isfinite(value)]
    cells = bins.cells[0]
    assert len(bins) <= most
    assert sum(bins.count) == len(rows) == sum(bins.cells[1].finite)
    assert sum(cells.finite) == len(finite)
    if finite:
        assert (min(cells.low), max(cells.high)) == (min(finite), max(finite))
        for low, mean, high, count in zip(cells.low, cells.mean, cells.high, cells.finite, strict=True):
            slack = 1e-9 * max(abs(low), abs(high)) if count else 0.0
            assert not count or low - slack <= mean <= high + slack
    if rows:
        assert min(bins.x_low) == min(step for step, _ in rows)
        assert max(bins.x_end) == max(step for step, _ in rows)


def test_a_long_curve_is_merged_and_a_range_is_read_again(job: FakeJob) -> None:
    job.rank(0).records(
        *(log({"loss": 1000.0 if step == 6543 else step % 7, "lr": 1}, step, step / 10) for step in range(20_000))
    )
    whole = series(job, names=["loss"], width=100)
    assert len(whole["x"]) <= 100
    assert max(whole["high"]) == 1000.0
    assert min(whole["low"]) == 0
    assert not ask(job, width=100)["complete"]
    assert max(len(bins) for bins in index_of(job).ranks[0].by_names.values()) <= MOST
    near = series(job, names=["loss"], low=6540, high=6560)
    assert near["x"] == list(range(6540, 6561))
    assert near["y"] == [1000.0 if step == 6543 else step % 7 for step in range(6540, 6561)]
    assert ask(job, names=["loss"], low=6540, high=6560)["complete"]
    assert series(job, names=["lr"], x="time", low=654.05, high=654.35)["x"] == [654.1, 654.2, 654.3]


def test_a_range_of_curves_without_steps(job: FakeJob) -> None:
    rows = [log({"a": count} if count % 3 else {"b": count}) for count in range(9000)]
    job.rank(0).records(*rows)
    a = [row["v"]["a"] for row in rows if "a" in row["v"]]
    found = series(job, names=["a"], low=4000, high=4010)
    assert found["x"] == list(range(4000, 4011))
    assert found["y"] == a[4000:4011]


def test_no_number_is_a_gap(job: FakeJob) -> None:
    job.rank(0).records(
        *(log({"loss": value}, step) for step, value in enumerate([1.0, math.nan, math.inf, 1e308, 10**400, 2]))
    )
    found = series(job)
    assert [math.isnan(y) for y in found["y"]] == [False, True, True, False, True, False]
    assert found["x"] == [0, 1, 2, 3, 4, 5]
    coarse = series(job, width=1)
    assert len(coarse["x"]) == 6  # not fewer than 16 points are told


def test_a_merged_gap_still_breaks_the_line(job: FakeJob) -> None:
    job.rank(0).records(*(log({"loss": math.nan if step == 77 else 1e308}, step) for step in range(400)))
    found = series(job, width=20)
    assert sum(map(math.isnan, found["y"])) == 1
    assert found["x"] == sorted(found["x"])
    assert all(y == pytest.approx(1e308) for y in found["y"] if not math.isnan(y))


def test_steps_may_go_backwards_or_be_anything(job: FakeJob) -> None:
    job.rank(0).records(*(log({"a": step}, step) for step in [*range(3000), *range(3000)]))
    found = series(job)
    assert found["x"] == sorted(found["x"])
    assert all(low - 10 <= x <= high + 10 for x, low, high in zip(found["x"], found["low"], found["high"], strict=True))
    job.rank(1).records(*(log({"b": 1}, step) for step in ("text", math.nan, 10**400, 2**60, None, [1], -5)))
    found = series(job, names=["b"])
    assert len(found["x"]) == 7
    assert all(map(math.isfinite, found["x"]))


def test_the_band_is_over_the_ranks(job: FakeJob) -> None:
    for rank, factor in ((0, 1), (1, 2), (2, 6)):
        job.rank(rank).records(*(log({"a": step * factor}, step) for step in range(10 + rank)))
    band = series(job, mode="band")
    assert band["rank"] is None
    assert (band["x"][:3], band["y"][:3]) == ([0, 1, 2], [0, 3, 6])
    assert (band["low"][2], band["high"][2]) == (2, 12)
    assert len(band["x"]) == 10, "as far as all ranks are"
    assert ask(job, mode="band")["complete"]
    assert series(job, mode="rank0")["rank"] == 0


def test_the_band_of_ranks_binned_differently_has_no_zigzag(job: FakeJob) -> None:
    for rank, steps in ((0, 4090), (1, 4100)):
        job.rank(rank).records(*(log({"a": rank}, step) for step in range(steps)))
    band = series(job, mode="band", width=2000)
    assert set(band["y"][:-10]) == {0.5}


def test_a_million_names_are_bounded(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curveindex, "NAMES", 50)
    job.rank(0).records(
        *(log({f"name{number}": 1, f"other{number}": 2}, number) for number in range(500)), log({"x" * 999: 1})
    )
    index = index_of(job)
    assert len(index.names.kept) == 50
    assert "the first 50 are shown" in index.names.note
    assert len(index.ranks[0].by_names) <= 64
    assert len(ask(job)["series"]) == 50


def test_many_sets_of_names_are_binned_name_by_name(job: FakeJob) -> None:
    names = [f"n{number}" for number in range(9)]
    rows = [log({name: step for bit, name in enumerate(names) if (step + 1) >> bit & 1}, step) for step in range(511)]
    job.rank(0).records(*rows)
    assert all(len(one["x"]) == 256 and one["x"] == one["y"] for one in ask(job)["series"])


def test_too_many_curves_are_refused_in_words(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "SERIES", 5)
    for rank in range(3):
        job.rank(rank).records(log({"a": 1, "b": 2}, 0))
    with pytest.raises(UserError, match="2 curves of 3 ranks"):
        ask(job)
    assert len(ask(job, mode="rank0")["series"]) == 2


def test_damaged_lines_and_endless_ones_are_passed_over(job: FakeJob) -> None:
    file = job.rank(0).files.metrics(0)
    job.rank(0).records(log({"a": 1}, 0))
    with open(file, "ab") as out:
        out.write(
            b'{"t": 1, "k": "log", "v": {"a": NaN}, "step": 1}\nnot json\n[1]\n{"k":"log","v":3}\n'
            b'{"k":"log","v":{"a":1}}\n'
        )
        out.write(b'{"' + b"x" * 3_000_000 + b'": 1}\n' + b"[" * 100_000 + b"\n\xff\xfe\n")
    job.rank(0).records(log({"a": 5}, 2))
    found = series(job)
    assert found["x"] == [0, 1, 2]
    assert math.isnan(found["y"][1])


def test_the_status_tells_steps_last_values_and_progress(job: FakeJob) -> None:
    job.rank(1).records(
        log({"loss": 2.0, "lr": math.nan}, 7),
        {"t": 1, "k": "progress", "id": 0, "desc": "epochs", "n": 1, "total": 3},
        {"t": 1, "k": "progress", "id": 1, "desc": "batches", "n": 5, "total": 10},
    )
    told = status.of("running", index_of(job), {})
    assert told["progress"] == {"desc": "epochs", "n": 1, "total": 3}
    assert told["ranks"]["1"]["step"] == 7
    assert told["ranks"]["1"]["last"]["loss"] == 2.0
    assert math.isnan(told["ranks"]["1"]["last"]["lr"])
    assert told["curves"] == {"version": 1, "names": ["loss", "lr"], "note": ""}


def test_the_last_values_of_a_long_file_are_there_at_once(job: FakeJob) -> None:
    job.rank(0).records(*(log({"loss": step}, step) for step in range(20_000)))
    index = CurveIndex.of(job.paths)
    index.look()
    assert status.of("running", index, {})["ranks"]["0"] == {"step": 19_999, "last": {"loss": 19_999}}


def test_no_call_takes_long(job: FakeJob) -> None:
    values = ",".join(f'"curve{number}":{number + 0.123456789}' for number in range(20))
    lines = b"".join(
        b'{"t":%d.5,"k":"log","step":%d,"v":{%s}}\n' % (step, step, values.encode()) for step in range(10_000)
    )
    for rank in range(3):
        job.rank(rank)._append(job.rank(rank).files.metrics(rank), lines)
    index, longest, done = CurveIndex.of(job.paths), 0.0, False
    index.look()
    while not done:
        begun = time.thread_time()
        done = index.advance(0.05)
        longest = max(longest, time.thread_time() - begun)
    assert index.version == 30_000
    assert longest < 0.5  # of the processor: others may have it for longer


def test_names_that_no_browser_takes_are_left_out(job: FakeJob) -> None:
    job.rank(0).records({"t": 1.0, "k": "log", "step": 1, "v": {"\ud800": 1.0, "x" * 300: 2.0, "loss": 3.0}})
    answer = ask(job)
    assert [one["name"] for one in answer["series"]] == ["loss"]


def logged(job: FakeJob, rank: int, values: list[float]) -> None:
    job.rank(rank).records(*({"t": 1.0 + x, "k": "log", "step": x, "v": {"loss": y}} for x, y in enumerate(values)))


def test_a_mean_ends_with_the_slowest_rank(job: FakeJob) -> None:
    logged(job, 0, [4.0, 3.0, 2.0, 0.0])
    logged(job, 1, [6.0, 5.0, 4.0])
    (band,) = ask(job, mode="band")["series"]
    assert (band["x"], band["y"]) == ([0.0, 1.0, 2.0], [5.0, 4.0, 3.0])
    assert (band["low"][-1], band["high"][-1]) == (2.0, 4.0)


def test_a_rank_that_stopped_long_ago_does_not_end_the_mean(job: FakeJob) -> None:
    logged(job, 0, [float(x) for x in range(10)])
    logged(job, 1, [0.0, 1.0])
    (band,) = ask(job, mode="band")["series"]
    assert band["x"] == [float(x) for x in range(10)]


def test_progress_is_of_the_rank_that_is_furthest_behind(job: FakeJob) -> None:
    for rank, done in ((0, 200), (1, 95)):
        job.rank(rank).records({"t": 1.0, "k": "progress", "id": 0, "desc": "train", "n": done, "total": 200})
    found = status.progress(index_of(job))
    assert found == {"desc": "train", "n": 95, "total": 200}


def test_without_steps_the_lines_are_counted(job: FakeJob) -> None:
    job.rank(0).records(*({"t": 1.0, "k": "log", "step": None, "v": {"loss": 1.0}} for _ in range(7)))
    job.rank(1).records({"t": 1.0, "k": "log", "step": 40, "v": {"loss": 1.0}}, log({"loss": 2.0}, 41))
    found = status.of("running", index_of(job), {})
    assert {rank: one["step"] for rank, one in found["ranks"].items()} == {"0": 6, "1": 41}
