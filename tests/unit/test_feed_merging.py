"""Curves of a running job: merged once, and the same as if all were merged anew."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.feed import curves
from jupyter_torchdist.feed.bins import MOST
from jupyter_torchdist.feed.curveindex import CurveIndex
from jupyter_torchdist.protocol.feed import CurvesAsked
from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.testing import FakeJob
from tests.curves import answer_of


@pytest.fixture
def job(tmp_path: Path) -> FakeJob:
    job = FakeJob(Home(tmp_path / "home"), ranks=3)
    job.close()
    return job


def logged(rank: int, step: int, **values: float) -> dict[str, Any]:
    noise = random.Random(rank * 1_000_003 + step)
    values = values or {"loss": noise.random() + rank, "lr": noise.random()}
    return {"t": step / 10 + rank / 1000, "k": "log", "step": step, "v": values}


def read(index: CurveIndex) -> CurveIndex:
    index.look()
    while not index.advance(1.0):
        pass
    return index


def ask(index: CurveIndex, mode: str = "band", x: str = "step", width: int = 100) -> dict[str, Any]:
    return answer_of(begun(index, mode, x, width))


def begun(index: CurveIndex, mode: str = "band", x: str = "step", width: int = 100) -> curves.Work:
    asked = CurvesAsked.from_json({"mode": mode, "x": x, "width": width})
    return curves.answer(read(index), asked)


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (one["complete"], len(one["series"])) == (other["complete"], len(other["series"]))
    for mine, its in zip(one["series"], other["series"], strict=True):
        assert (mine["name"], mine["rank"]) == (its["name"], its["rank"])
        for key in ("x", "y", "low", "high"):
            assert mine[key] == pytest.approx(its[key], nan_ok=True)


@pytest.mark.parametrize("x", ["step", "time"])
@pytest.mark.parametrize("mode", ["ranks", "band", "rank0"])
def test_an_answer_while_a_curve_grows_is_the_one_that_all_of_it_gives(job: FakeJob, mode: str, x: str) -> None:
    index = CurveIndex(job.paths)
    at = 0
    for more in (1, 30, 170, 2, 1900, 64):
        for rank in range(3):
            job.rank(rank).records(*(logged(rank, step) for step in range(at, at + more)))
        at += more
        ask(index, mode, x)
    fresh = read(CurveIndex(job.paths))
    same(ask(index, mode, x), ask(fresh, mode, x))


def test_bins_are_joined_while_an_answer_is_made(job: FakeJob) -> None:
    for rank in range(3):
        job.rank(rank).records(*(logged(rank, step) for step in range(2040)))
    index = CurveIndex(job.paths)
    work = begun(index)
    next(work)
    for rank in range(3):
        job.rank(rank).records(*(logged(rank, step) for step in range(2040, 2100)))
    read(index)
    assert answer_of(work)["series"][1] == ask(index)["series"][1]


@pytest.mark.parametrize(("mode", "width"), [("ranks", 100), ("ranks", 5000), ("rank0", 77), ("band", 5000)])
@pytest.mark.parametrize("lines", [1, 2, 500, 2048, 2049, 3000])
def test_it_is_the_answer_that_is_made_without_it(
    job: FakeJob, monkeypatch: pytest.MonkeyPatch, mode: str, width: int, lines: int
) -> None:
    for rank in range(3):
        job.rank(rank).records(*(logged(rank, step) for step in range(lines)))
    index = CurveIndex(job.paths)
    merged = ask(index, mode, "step", width)
    assert index.merging._kept or lines == 1
    with monkeypatch.context() as patch:
        patch.setattr(curves._Answer, "add_merged", lambda *_: False)
        same(merged, ask(index, mode, "step", width))


@pytest.mark.parametrize("x", ["step", "time"])
def test_a_coarse_band_holds_every_value_in_order(job: FakeJob, x: str) -> None:
    lengths = (5000, 4700, 5003)
    for rank, length in enumerate(lengths):
        job.rank(rank).records(*(logged(rank, step) for step in range(length)))
    rows = [logged(rank, step)["v"]["loss"] for rank, length in enumerate(lengths) for step in range(length)]
    band = ask(CurveIndex(job.paths), "band", x, 200)["series"][0]
    assert len(band["x"]) <= 2 * 200
    assert band["x"] == sorted(set(band["x"]))
    assert (min(band["low"]), max(band["high"])) == (min(rows), max(rows))
    assert all(low <= y <= high for low, y, high in zip(band["low"], band["y"], band["high"], strict=True))


def test_huge_values_have_a_mean(job: FakeJob) -> None:
    for rank in range(3):
        job.rank(rank).records(*(logged(rank, step, loss=1.5e308) for step in range(400)))
    (band,) = ask(CurveIndex(job.paths))["series"]
    assert all(y == pytest.approx(1.5e308) for y in band["y"])


def test_other_steps_gaps_and_steps_back_are_not_merged_so(job: FakeJob) -> None:
    index = CurveIndex(job.paths)
    for rank in range(3):
        job.rank(rank).records(*(logged(rank, 2 * step + rank, loss=1.0) for step in range(300)))
    assert set(ask(index)["series"][0]["y"]) == {1.0}
    assert not index.merging._kept
    job.rank(0).records(logged(0, 600, loss=math.nan), *(logged(0, step, loss=2.0) for step in range(300)))
    own = ask(index, "rank0", width=5000)["series"][0]
    assert own["x"] == sorted(own["x"])
    assert sum(map(math.isnan, own["y"])) == 1
    assert not index.merging._kept


def test_a_long_file_is_binned_widely_at_once_and_rare_curves_are_not(job: FakeJob) -> None:
    rows = [logged(0, step, **({"rare": 1.0} if step % 500 == 499 else {"loss": step})) for step in range(20_000)]
    job.rank(0).records(*rows)
    index = CurveIndex(job.paths)
    index.look()
    index.ranks[0].advance(200_000)
    assert index.ranks[0].by_names[("loss",)].per >= 4
    assert index.ranks[0].by_names[("rare",)].per == 1
    read(index)
    assert MOST // 4 <= len(index.ranks[0].by_names[("loss",)]) <= MOST
    (loss, rare) = ask(index, "rank0", width=5000)["series"]
    assert len(rare["x"]) == 40
    assert (min(loss["low"]), max(loss["high"])) == (0, 19_998)
