"""FSDP and the way back from it, on real ranks; what each check asserts stands in ``tests/strategies``."""

from __future__ import annotations

from pathlib import Path

import pytest

from jupyter_torchdist import launch
from tests.strategies import sharding
from tests.strategies.ranks import run_checks


@pytest.mark.parametrize("ranks", [2])
def test_fsdp(home: Path, ranks: int) -> None:
    for failed in launch(run_checks, (sharding,), ranks=ranks):
        assert not failed, "\n".join(failed.values())
