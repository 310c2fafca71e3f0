"""A notebook on a machine with GPUs: a real kernel, the magic's line, what a user reads."""

from __future__ import annotations

import pytest

from tests.notebook import Notebook
from tests.places import GPUS, Place

CELL = """
import torch
import jupyter_torchdist as td

x = torch.arange(6.0, device=td.device).reshape(2, 3)
td.log(loss=x.sum() * 0 + 0.5)
print("on", td.device.type)
x.sum().item()
"""
FAILS = """
import torch
import jupyter_torchdist as td

torch.ones(2, 3, device=td.device) @ torch.ones(2, 3, device=td.device)
"""


def test_a_cell_its_result_and_its_failure(kernel: Notebook, one: Place) -> None:
    cell = kernel.run(f"%%distribute {one.line}\n{CELL}", timeout=120)
    assert f"on {one.kind}" in cell.text and "15.0" in cell.text
    assert kernel.value("x.tolist(), x.device.type") == ([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], "cpu")
    failed = kernel.try_run(f"%%distribute {one.line}\n{FAILS}", timeout=120)
    assert failed.error is not None and failed.error.name == "RuntimeError"
    assert "mat1 and mat2 shapes" in failed.error.value and "torch.ones(2, 3" in failed.error.traceback


def test_what_is_said_of_the_machine(kernel: Notebook, one: Place) -> None:
    said = kernel.run("%dist doctor", timeout=120).text
    assert "torch" in said and "warm start" in said and "safe to fork" in said, said
    if one.on_gpu:
        assert GPUS[0].name in said and GPUS[0].name in kernel.run("%dist nodes").text


def test_a_gpu_that_the_kernel_itself_uses_is_free_for_its_cells(kernel: Notebook, one: Place) -> None:
    """As after ``model.cuda()`` in an earlier cell."""
    if not one.on_gpu:
        pytest.skip("on a CPU nothing is held")
    kernel.run("import torch\nmine = torch.ones(1000, device='cuda')")
    assert "15.0" in kernel.run(f"%%distribute {one.line}\n{CELL}", timeout=120).text
    assert kernel.value("mine.sum().item()") == 1000.0
