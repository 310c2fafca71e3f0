"""``--launcher spark`` on a real Spark of two workers: what a job gives, its end, attaching, the notebook's session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.client import Job, submit
from jupyter_torchdist.client.drivers import DriverPool
from jupyter_torchdist.protocol.options.parsing import parse_options
from jupyter_torchdist.verbs import programs
from tests.cluster.cells import MEET, SLEEP, kill_driver
from tests.cluster.cells import start as started
from tests.engines.jobs import COUNT, asleep, said
from tests.engines.spark_cluster import MASTER, SparkCluster
from tests.integration.test_gallery import execute
from tests.leaks import wait_until

pytestmark = pytest.mark.timeout(600)
PATIENCE = 250.0
"""Spark starts three processes of Java for a job, which take a minute on a machine that has much else to do."""


def start(pool: DriverPool, source: str, options: str = "", names: dict[str, Any] | None = None) -> Job:
    """Two nodes with two ranks each, unless ``options`` say otherwise."""
    words = f"--launcher spark --nodes 2 --ranks 4 -O master={MASTER} {options}"
    return started(pool, source, words, names, python=None)


def test_ranks_of_two_nodes_give_values_and_lines_beyond_the_end_of_a_driver(
    spark_pool: DriverPool, notebook: dict[str, Any]
) -> None:
    exec("import torch\nweights = torch.zeros(3)", notebook)
    job = start(spark_pool, COUNT, names=notebook)
    assert wait_until(lambda: "line 10" in job.logs(3), PATIENCE), job.state.reason
    kill_driver(job)
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason
    for rank in range(4):
        assert "sum 6.0" in job.logs(rank)
        assert [line for line in job.logs(rank).splitlines() if "line" in line] == [f"line {n}" for n in range(60)]
    job.bring(notebook)
    assert notebook["weights"].tolist() == [6.0, 6.0, 6.0]
    assert job.value == 18.0


def test_a_cancel_leaves_nothing_of_spark(spark_pool: DriverPool, spark: SparkCluster) -> None:
    job = start(spark_pool, SLEEP)
    assert wait_until(lambda: asleep(job), PATIENCE), job.state.reason
    assert len(spark.executors()) == 2
    assert spark.left() != []
    job.interrupt()
    assert job.wait(PATIENCE).state == "cancelled"
    assert wait_until(lambda: not spark.left()), spark.left()


@pytest.mark.soak
def test_a_job_that_waits_for_executors_can_be_cancelled(spark_pool: DriverPool, spark: SparkCluster) -> None:
    job = start(spark_pool, SLEEP, "-O master=local-cluster[1,2,1024]")
    assert wait_until(lambda: "waiting for 2 executors, of which Spark has given 1" in said(job), PATIENCE), said(job)
    kill_driver(job)
    job.interrupt()
    assert job.wait(PATIENCE).state == "cancelled"
    assert wait_until(lambda: not spark.left()), spark.left()


@pytest.mark.soak
def test_an_exception_of_a_rank_is_the_notebooks_own(spark_pool: DriverPool) -> None:
    job = start(spark_pool, MEET + "if dist.get_rank() == 3:\n    raise ValueError('no good')\ndist.barrier()\n")
    assert job.wait(PATIENCE).state == "failed"
    assert "rank 3 on " in job.state.reason and "ValueError: no good" in job.state.reason
    with pytest.raises(ValueError, match="no good"):
        job.raise_for_state()


@pytest.mark.soak
def test_ranks_have_the_gpus_that_spark_gives_their_task(spark_pool: DriverPool, tmp_path: Path) -> None:
    found = tmp_path / "found.sh"
    found.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["4", "6"]}'\n""")
    found.chmod(0o755)
    worker = f"-O spark.worker.resource.gpu.amount=2 -O spark.worker.resource.gpu.discoveryScript={found}"
    options = parse_options(f"--launcher spark --gpus 2 -O master=local-cluster[1,2,1024] {worker}")
    command = programs.request(options, ["sh", "-c", "echo has $CUDA_VISIBLE_DEVICES"], command=True)  # no torch
    job = submit(command, pool=spark_pool)
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason
    assert ["has 4,6" in job.logs(rank) for rank in range(2)] == [True, True]


DISTRIBUTOR = """
import sys
from pyspark.sql import SparkSession
from jupyter_torchdist import TorchDistributor
from jupyter_torchdist.client.drivers import pool

def train(rate):
    import os
    import torch.distributed as dist
    dist.init_process_group("gloo")
    return rate, dist.get_world_size(), os.environ["LOCAL_WORLD_SIZE"]

if __name__ == "__main__":
    session = SparkSession.builder.master(sys.argv[1]).config("spark.cores.max", 1).config("spark.executor.cores", 1)
    session = session.getOrCreate()
    print(TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(train, 0.5))
    print("spark has", session.range(3).count())
    session.stop()
    pool().close()
"""


@pytest.mark.soak
def test_torch_distributor_runs_on_the_cluster_of_the_notebooks_session(spark: SparkCluster, tmp_path: Path) -> None:
    (tmp_path / "notebook.py").write_text(DISTRIBUTOR)
    with spark.lasting(cores=3) as master:
        command = [sys.executable, "notebook.py", master]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert "(0.5, 2, '1')\n" in done.stdout, done.stderr
    assert "spark has 3\n" in done.stdout, done.stderr


@pytest.mark.soak
def test_the_notebook(spark: SparkCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with spark.lasting(cores=3) as master:
        settings = {"spark.master": master, "spark.cores.max": "1", "spark.executor.cores": "1"}
        (tmp_path / "spark-defaults.conf").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
        texts = execute("spark", tmp_path)
    assert master in texts["session"]
    assert all(f"rank {rank} of 2: loss " in texts["function-run"] for rank in range(2))
    arguments = "Namespace(learning_rate=0.001, batch_size=16)"
    assert all(f"process {rank} of 2: {arguments}" in texts["file-run"] for rank in range(2))
    assert "sum 2.0; Spark counts 3" in texts["after"]
