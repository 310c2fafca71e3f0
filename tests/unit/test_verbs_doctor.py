"""The checks of this machine that need no process."""

from __future__ import annotations

from pathlib import Path

import pytest

from jupyter_torchdist.diagnosis.hosts import FAULT, FINE, WARNING, Check
from jupyter_torchdist.protocol.plan import Gpu, Inventory
from jupyter_torchdist.verbs import doctor


def test_problems_come_with_a_remedy() -> None:
    assert doctor.line(Check("python", FINE, "3.11", "unneeded")) == "fine     python: 3.11\n"
    told = doctor.line(Check("torch", FAULT, "not installed", "pip install torch"))
    assert told == "fault    torch: not installed\n         → pip install torch\n"
    assert doctor.summary([FINE]) == "all is well"
    assert doctor.summary([FAULT, WARNING, FINE, WARNING]) == "1 fault, 2 warnings"


def test_a_data_directory_that_cannot_be_written_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHDIST_HOME", str(tmp_path / "file" / "below"))
    check = doctor._data_directory()
    assert check.level == FAULT and "TORCHDIST_HOME" in check.remedy


def test_the_data_directory_is_left_as_it_was(home: Path) -> None:
    assert doctor._data_directory().name == "data directory"
    assert list(home.iterdir()) == []


def test_a_runtime_directory_whose_sockets_have_too_long_names_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDIST_RUNTIME_DIR", str(tmp_path / ("x" * 120)))
    check = doctor._runtime_directory()
    assert check.level == FAULT and "short path" in check.remedy


def test_gpus_without_cuda_in_torch_are_a_problem() -> None:
    gpu = Gpu("GPU-1", 0, "H200", 10_000_000_000, 0)
    assert doctor._torch(Inventory("box", 2, 1, (gpu,), torch="2.13.0+cpu")).level == FAULT
    assert doctor._torch(Inventory("box", 2, 1, (gpu,), torch="2.13.0")).level == FINE
    assert "--ranks" in doctor._gpus(Inventory("box", 2, 1)).found
    assert "pip install" in doctor._torch(Inventory("box", 2, 1)).remedy
