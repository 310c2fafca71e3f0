"""A job on two nodes is one run."""

from __future__ import annotations

import threading
from pathlib import Path

from jupyter_torchdist.protocol.paths import JobPaths
from jupyter_torchdist.store import gauges, tracking
from tests.integration.test_two_nodes import JOB, TwoNodes, disks, drive, nodes
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
        return any(taken.memory is not None for _, ranks in lines for rank, taken in ranks.items() if rank == 3)

    def end() -> None:
        wait_until(measured, 60.0)
        gate.touch()

    thread = threading.Thread(target=end)
    thread.start()
    drive(CELL, nodes, tmp_path, names={"gate": str(gate)}, track=("mlflow",))
    thread.join()
    assert wait_until(lambda: tracking.of(paths, "mlflow").closed, 60), tracking.lines(paths)
    (run,) = runs.of(JOB)
    assert run.info.status == "FINISHED" and run.data.params["nodes"] == "2"
    assert [run.data.metrics[name] for name in ("rank", "rank_1/rank", "rank_2/rank", "rank_3/rank")] == [0, 1, 2, 3]
    assert {"system/node0/rank_1/memory_bytes", "system/node1/rank_3/memory_bytes"} <= set(run.data.metrics)
    assert runs.files(run) >= {"job/spec.json", "job/plan.json", "job/journal.jsonl"}
