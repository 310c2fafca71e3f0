"""The parts of strategies on real ranks, many checks a job; what each asserts stands in ``tests/strategies``."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from jupyter_torchdist.functions.decorated import launch
from tests.strategies import pipelines
from tests.strategies.ranks import run_checks

pytestmark = pytest.mark.strategies

DEEPSPEED = find_spec("deepspeed") is not None

PARTS = [
    *(("sharding", 2), ("sharding_options", 2), ("replicating", 2), ("averaging", 2), ("inside", 2), ("hybrid", 4)),
    *(
        ("splitting", 2),
        ("lengths+keeping+holding+mingling+by_hand", 2),
        ("unchanged", 2),
        ("hugging_face", 2),
        ("products", 4),
    ),
    ("preparing+effects", 2),
    *(("finite", 2), ("pipelines+others", 2), ("leaving", 2), ("pipeline_schedules", 2)),
    *(pytest.param(module, 4, marks=pytest.mark.soak) for module in ("pipelines", "products_more")),
    pytest.param(
        *("zeros", 2),
        marks=[pytest.mark.skipif(not DEEPSPEED, reason="make test-deepspeed"), pytest.mark.timeout(300)],
        id="deepspeed",
    ),
]
"""Modules of ``tests.strategies`` by their names: what they import takes seconds, and one worker needs each."""


@pytest.mark.parametrize(("names", "ranks"), PARTS)
def test_parts(home: Path, names: str, ranks: int) -> None:
    modules = tuple(import_module(f"tests.strategies.{name}") for name in names.split("+"))
    for failed in launch(run_checks, modules, ranks=ranks):
        assert not failed, "\n".join(failed.values())


def test_an_error_in_one_stage_ends_all(home: Path) -> None:
    with pytest.raises(ValueError, match="broken layer"):
        launch(pipelines.break_in_one_stage, ranks=2)
