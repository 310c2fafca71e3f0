"""Curves and progress of a rank."""

from __future__ import annotations

import math
import os
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from jupyter_torchdist.protocol import codec
from jupyter_torchdist.ranks.streams.metrics import LONGEST, Recorder
from jupyter_torchdist.ranks.streams.scalars import NotAScalar, Unread, _arrival, read


def lines(path: Path) -> list[dict[str, Any]]:
    return [codec.loads(line) for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1),
        (True, 1),
        (0.5, 0.5),
        (torch.tensor(2.5), 2.5),
        (torch.tensor([3], dtype=torch.int64), 3),
        (torch.tensor([[1.5]], dtype=torch.bfloat16, requires_grad=True), 1.5),
        (torch.tensor(True), 1),
        (numpy.float32(0.25), 0.25),
        (numpy.array([4]), 4),
        (numpy.int64(7), 7),
        (Decimal("1.5"), 1.5),
        (Fraction(1, 4), 0.25),
        (torch.nn.Parameter(torch.ones(1)), 1.0),
    ],
)
def test_scalars_are_read(value: Any, number: float) -> None:
    found = read(value)
    assert found == number
    assert type(found) in (int, float)


@pytest.mark.parametrize(
    "value",
    ["text", None, [1], 1j, torch.ones(2), torch.tensor(1j), torch.ones(1, device="meta"), numpy.ones(3), object()],
)
def test_what_is_no_scalar_is_refused(value: Any) -> None:
    with pytest.raises(NotAScalar):
        read(value)


def test_log_writes_lines(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "m")
    recorder.log({"loss": 0.5, "big": 2**60, "nan": math.nan}, 3)
    recorder.log({"loss": torch.tensor(1.0)})
    first, second = lines(tmp_path / "m")
    assert (first["k"], first["step"], first["v"]["loss"], first["v"]["big"]) == ("log", 3, 0.5, 2**60)
    assert math.isnan(first["v"]["nan"])
    assert second["step"] is None and second["v"] == {"loss": 1.0}
    assert second["t"] >= first["t"] and "auto" not in first


def test_a_loss_that_is_nan_is_told_of(tmp_path: Path) -> None:
    told: list[tuple[str, int | None]] = []
    recorder = Recorder(tmp_path / "m", not_a_number=lambda name, step: told.append((name, step)))
    recorder.log({"lr": math.nan}, 1)
    for step, value in enumerate([0.5, math.inf, math.nan], start=1):
        recorder.log({"loss": torch.tensor(value)}, step, auto=True)
    recorder.log({"loss": torch.tensor(math.nan)}, 4, auto=True, drawn=False)
    assert told == [("loss", 3), ("loss", 4)]
    assert lines(tmp_path / "m")[-1] | {"t": 0} == {"t": 0, "k": "log", "step": 4, "v": {}, "auto": True}


def test_a_value_is_read_when_it_is_logged(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "m")
    total = torch.zeros(())
    for _ in range(3):
        total += 1
        recorder.log({"total": total})
    assert [line["v"]["total"] for line in lines(tmp_path / "m")] == [1, 2, 3]


def test_what_is_not_a_number_is_left_out_and_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(tmp_path / "m")
    for _ in range(3):
        recorder.log({"loss": 1.0, "phase": "warm-up"})
    recorder.log({"phase": "warm-up"})
    assert [line["v"] for line in lines(tmp_path / "m")] == [{"loss": 1.0}] * 3
    assert capsys.readouterr().err == "td.log: phase is a str, not a number; it is left out (said once)\n"


def test_a_value_still_on_its_way_holds_back_what_follows(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "m")
    arrived = False

    def value() -> float:
        if not arrived:
            raise Unread
        return 0.5

    recorder._pending.append((1.0, None, False, True, {"loss": value}))
    recorder.log({"loss": 0.25})
    assert lines(tmp_path / "m") == [] and recorder.deadline is not None
    arrived = True
    recorder.close()
    assert [line["v"]["loss"] for line in lines(tmp_path / "m")] == [0.5, 0.25]


def test_a_value_that_never_arrives_does_not_keep_the_rank(tmp_path: Path) -> None:
    def value() -> float:
        raise Unread

    recorder = Recorder(tmp_path / "m")
    recorder._pending.append((1.0, None, False, True, {"loss": value}))
    recorder.close(patience=0.01)


def test_a_value_that_the_device_lost_does_not_hide_the_error_that_ends_the_rank(tmp_path: Path) -> None:
    """The rank writes its curves before its exception: after an error on the device CUDA fails at every call."""

    class Failed:
        def query(self) -> bool:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    recorder = Recorder(tmp_path / "m")
    recorder._pending.append((1.0, None, False, True, {"loss": _arrival(Failed(), torch.tensor(1.0))}))
    recorder.log({"loss": 0.25})
    recorder.close()
    assert [line["v"]["loss"] for line in lines(tmp_path / "m")] == [0.25]


def test_odd_names_and_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(tmp_path / "m")
    for step in (torch.tensor(3), numpy.int64(4), 5.9, 2**60, "x", math.nan):
        recorder.log({'@at "quoted" ü': 1.0}, step)
    assert [line["step"] for line in lines(tmp_path / "m")] == [3, 4, 5, 2**60, None, None]
    assert {name for line in lines(tmp_path / "m") for name in line["v"]} == {'@at "quoted" ü'}
    assert capsys.readouterr().err.count("step is a str") == 1


def test_progress(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "m")
    assert list(recorder.progress(range(1000), desc="epoch")) == list(range(1000))
    for _ in recorder.progress(iter([1, 2, 3])):
        break
    written = lines(tmp_path / "m")
    first = [line for line in written if line["id"] == 0]
    assert (first[0]["n"], first[0]["total"], first[0]["desc"], first[0]["k"]) == (0, 1000, "epoch", "progress")
    assert first[-1]["n"] == 1000
    assert len(first) < 20
    assert written[-1]["id"] == 1 and written[-1]["n"] == 0 and written[-1]["total"] is None


def test_without_a_file_nothing_is_kept() -> None:
    recorder = Recorder()
    recorder.log({"loss": 1.0})
    assert list(recorder.progress([1, 2])) == [1, 2]
    assert recorder._pending == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_does_not_raise() -> None:
    recorder = Recorder(Path("/dev/full"))
    recorder.log({"loss": 1.0})
    assert list(recorder.progress([1])) == [1]


def test_any_name_makes_a_line_that_every_view_can_show(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    recorder = Recorder(path)
    names = ["x" * 1_000_000, "\ud800 half", 'quoted "', "é", "\n"]
    for name in names:
        recorder.log({name: 1.0})
    recorder.close()
    data = path.read_bytes()
    assert len(data) < 2000
    (long, *others) = [next(iter(codec.loads(line)["v"])) for line in data.splitlines()]
    assert len(long) == LONGEST and "…" in long
    assert others == ["\\ud800 half", *names[2:]]
