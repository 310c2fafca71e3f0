"""The benchmarks of launch and training in short, on GPUs: numbers for the page, and no limits but that they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.benchmarks import launch, training
from tests.benchmarks.report import Row, number
from tests.benchmarks.stage import Ranks
from tests.places import Place


def noted(rows: Iterator[Row], record_property: Callable[[str, object], None]) -> None:
    for row in rows:
        beside = "" if row.yardstick is None else f" ({row.beside}: {number(row.yardstick)} {row.unit})"
        record_property(row.what, f"{number(row.ours)} {row.unit}{beside}")
        assert row.ours > 0


def ranks(place: Place) -> Ranks:
    return Ranks(place.ranks, "nccl" if place.on_gpu else "gloo")


def test_launch(most: Place, record_property: Callable[[str, object], None]) -> None:
    noted(launch.rows(ranks(most), 1, forking=False), record_property)


def test_training(most: Place, record_property: Callable[[str, object], None]) -> None:
    runs, steps = (2, 2000) if most.on_gpu else (1, 50)
    noted(training.rows(ranks(most), runs, steps), record_property)
