"""The parts of strategies on real ranks, many checks a job; what each asserts stands in ``tests/strategies``."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from jupyter_torchdist import launch
from tests.strategies import hybrid, inside, pipelines, replicating, sharding, sharding_options
from tests.strategies.ranks import run_checks


@pytest.mark.parametrize(
    ("checks", "ranks"),
    [(sharding, 2), (sharding_options, 2), (replicating, 2), (inside, 2), (hybrid, 4), (pipelines, 2), (pipelines, 4)],
)
def test_parts(home: Path, checks: ModuleType, ranks: int) -> None:
    for failed in launch(run_checks, (checks,), ranks=ranks):
        assert not failed, "\n".join(failed.values())


def test_an_error_in_one_stage_ends_all(home: Path) -> None:
    with pytest.raises(ValueError, match="broken layer"):
        launch(pipelines.break_in_one_stage, ranks=2)
