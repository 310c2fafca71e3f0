"""Each strategy on three cells, equal to one device: what ``make test-torch`` runs with every release of torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jupyter_torchdist.protocol.spec import Options

from .expected import SAME
from .running import run_alone, run_cell
from .test_cells import check_equal
from .traces import Trace

pytestmark = pytest.mark.strategies

CELLS = {
    path.stem: path.read_text() for path in sorted((Path(__file__).parents[1] / "cells_of_all_kinds").glob("*.py"))
}
STRATEGIES = {
    "none": Options(ranks=2),
    "ddp": Options(ranks=2, strategy="ddp"),
    "fsdp": Options(ranks=2, strategy="fsdp"),
    "hsdp": Options(ranks=4, strategy="hsdp", option=("dp_shard=2",)),
    "tp": Options(ranks=2, strategy="tp"),
    "cp": Options(ranks=2, strategy="cp"),
    "pp": Options(ranks=2, strategy="pp"),
}
FIRST = "language_model"
"""The cell that CI runs."""


@pytest.fixture(scope="module")
def alone() -> Callable[[str], Trace]:
    """What a cell leaves on one device."""
    traces: dict[str, Trace] = {}

    def of(name: str) -> Trace:
        if name not in traces:
            traces.update(run_alone({name: CELLS[name]}))
        return traces[name]

    return of


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "task", [pytest.param(name, marks=[] if name == FIRST else [pytest.mark.soak]) for name in CELLS]
)
def test_task(task: str, strategy: str, alone: Callable[[str], Trace]) -> None:
    outcome = run_cell(CELLS[task], STRATEGIES[strategy])
    assert outcome.error is None, f"{outcome.error!r}\n{outcome.printed}\n{outcome.errors}"
    check_equal(outcome, alone(task), SAME)
