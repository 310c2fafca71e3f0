"""A node needs the rooms of ``NODE_ROOMS``, and nothing else of this package."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import jupyter_torchdist
from jupyter_torchdist.protocol.version import NODE_ROOMS

from ..ranks import RankJob, Warm

PACKAGE = Path(jupyter_torchdist.__file__).parent

CELL = """\
import importlib, pkgutil, jupyter_torchdist
home = jupyter_torchdist.__path__[0]
modules = [one.name for one in pkgutil.walk_packages([home], "jupyter_torchdist.") if "__main__" not in one.name]
for module in modules:
    importlib.import_module(module)
print("all of them", flush=True)
"""


@pytest.fixture
def warm() -> Iterator[Warm]:
    with Warm() as process:
        yield process


def test_a_rank_runs_from_the_rooms_of_a_node_alone(warm: Warm, tmp_path: Path) -> None:
    small = tmp_path / "site" / PACKAGE.name
    small.mkdir(parents=True)
    shutil.copy(PACKAGE / "__init__.py", small)
    for room in NODE_ROOMS:
        shutil.copytree(PACKAGE / room, small / room, ignore=shutil.ignore_patterns("__pycache__"))
    paths = {"PYTHONPATH": str(small.parent)}
    job = RankJob(warm, tmp_path, CELL, world=1, fresh=True, env=paths, bound=("home", "modules")).run()
    assert job.codes == {0: 0}, job.err(0)
    values = job.values()
    assert values["home"] == str(small)
    assert {name.split(".")[1] for name in values["modules"]} == set(NODE_ROOMS)
