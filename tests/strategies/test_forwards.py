"""A model whose samples are not independent is refused by name; one whose samples are trains the same, divided."""

from __future__ import annotations

from typing import Any

import pytest

from jupyter_torchdist.protocol.spec import Options

from .forwards import BETWEEN, attempt
from .running import run_cell

pytestmark = [pytest.mark.strategies, pytest.mark.timeout(400)]

ATTEMPTS = """
from tests.strategies.forwards import BETWEEN, attempt

found = {name: attempt(name) for name in BETWEEN}
"""


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What each of them gives in one process."""
    return {name: attempt(name) for name in BETWEEN}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_refused_or_the_same(ranks: int, alone: dict[str, Any]) -> None:
    outcome = run_cell(ATTEMPTS, Options(ranks=ranks, strategy="ddp"))
    assert outcome.error is None, outcome.error
    divided = {name: found for name, found in outcome.names["found"].items() if not isinstance(found, str)}
    assert divided == {name: pytest.approx(alone[name], rel=1e-5, abs=1e-6) for name in divided}
    fine = {name for name in BETWEEN if name.startswith("fine")}
    assert fine >= divided.keys() >= {"fine", "fine_distribution", "fine_positions_of_an_argument"}
    refusals = [found for found in outcome.names["found"].values() if isinstance(found, str)]
    assert all("-O model=whole" in words for words in refusals)


def test_whole_batches_train_all_of_them(alone: dict[str, Any]) -> None:
    """What is refused, runs with the option that the refusal names."""
    outcome = run_cell(ATTEMPTS, Options(ranks=2, strategy="ddp", option=("model=whole",)))
    assert outcome.error is None, outcome.error
    assert outcome.names["found"] == {name: pytest.approx(found, rel=1e-5, abs=1e-6) for name, found in alone.items()}
