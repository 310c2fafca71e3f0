"""A job on two nodes is one run: with agents of this machine, and on hosts in ``notebooks/mlflow.ipynb``."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_torchdist.protocol.paths import JobPaths
from jupyter_torchdist.store import gauges, tracking
from tests.cluster import hosts, node_python
from tests.cluster.cluster import Cluster
from tests.integration.test_gallery import execute
from tests.integration.test_two_nodes import JOB, TwoNodes, disks, drive, nodes
from tests.lacking import lacking
from tests.leaks import wait_until
from tests.trackers.conftest import Runs

__all__ = ["disks", "nodes"]

CELL = """
import os, time
import torch.distributed as dist
import jupyter_torchdist as td

td.log(rank=dist.get_rank(), step=0)
while not os.path.exists(gate):
    time.sleep(0.02)
"""


def test_two_nodes_are_one_run_with_the_curves_and_the_use_of_both(nodes: TwoNodes, runs: Runs, tmp_path: Path) -> None:
    paths, gate = JobPaths(tmp_path / "home" / "jobs" / JOB), tmp_path / "gate"

    def measured() -> bool:
        lines, _ = gauges.history(paths, 0)
        return {1, 3} <= {rank for _, ranks in lines for rank, taken in ranks.items() if taken.memory is not None}

    def end() -> None:
        wait_until(measured, 60.0)
        gate.touch()

    thread = threading.Thread(target=end)
    thread.start()
    drive(CELL, nodes, tmp_path, names={"gate": str(gate)}, track=("mlflow",))
    thread.join()
    assert wait_until(lambda: tracking.of(paths, "mlflow").closed), tracking.lines(paths)
    (run,) = runs.of(JOB)
    assert run.info.status == "FINISHED" and run.data.params["nodes"] == "2"
    assert [run.data.metrics[name] for name in ("rank", "rank_1/rank", "rank_2/rank", "rank_3/rank")] == [0, 1, 2, 3]
    assert {"system/node0/rank_1/memory_bytes", "system/node1/rank_3/memory_bytes"} <= set(run.data.metrics)
    assert runs.files(run) >= {"job/spec.json", "job/plan.json", "job/journal.jsonl"}


@pytest.fixture
def bed(
    tmp_path_factory: pytest.TempPathFactory, home: Path, lasting: set[int], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    """Two hosts that ``ssh`` finds."""
    if why := hosts.refused():
        pytest.skip(f"no hosts on this machine: {why}")
    if missing := hosts.missing_programs():
        lacking(f"no {', '.join(missing)} here: make cluster")
    python = node_python.make(tmp_path_factory.mktemp("node") / "python")
    made = Cluster.up(tmp_path_factory.mktemp("bed"), 2, python=python)
    monkeypatch.setenv("PATH", f"{made.bin}:{os.environ['PATH']}")
    yield made
    made.down()


@pytest.mark.timeout(400)
def test_the_notebook(bed: Cluster, runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "torchdist.toml").write_text(f'[hosts]\npython = "{node_python.PLACE}/bin/python"\n')
    texts = execute("mlflow", tmp_path)
    assert f"mlflow: {runs.uri}" in texts["run"]
    assert "FINISHED nodes: 2 ranks: 4" in texts["found"]
    assert "32 steps, loss 0." in texts["found"]
