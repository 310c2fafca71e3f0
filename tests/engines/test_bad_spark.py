"""``--launcher spark`` with what it cannot do: each refusal in words, within seconds; a lost executor."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from jupyter_torchdist.client.drivers import DriverPool
from tests.cluster.cells import SLEEP
from tests.engines import jobs
from tests.engines.jobs import AGAIN, asleep
from tests.engines.ray_cluster import free_ports
from tests.engines.spark_cluster import MASTER, SparkCluster
from tests.engines.test_spark import PATIENCE, start
from tests.leaks import wait_until

pytestmark = pytest.mark.timeout(600)


planned = partial(jobs.planned, "spark")
refusal = partial(jobs.refusal, "spark")


def test_without_pyspark_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    said = refusal("--ranks 2")
    assert f"the package pyspark, which is not installed in {sys.executable}" in said
    assert "pip install 'jupyter_torchdist[spark]'" in said


no_spark = find_spec("pyspark") is None or shutil.which("java") is None
spark_is_here = pytest.mark.skipif(no_spark, reason="pyspark or java is not installed here: make test-spark")


@spark_is_here
def test_without_java_the_message_says_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert "needs Java 17 or newer, and there is none: JAVA_HOME is not set, and PATH has no java" in refusal("")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert f"JAVA_HOME={tmp_path} has no bin/java" in refusal("")


@spark_is_here
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--ranks 2 --hosts a,b", "Spark chooses the nodes"),
        ("--gpus 2 --gpu-type A100", "Spark does not say which GPUs it has"),
        ("--ranks 2 -O master=sc://head", "-O master=sc://head: expected a cluster that runs executors"),
        ("--ranks 2 -O cpus=0", "-O cpus=0: expected a whole number"),
        (
            "--ranks 2 -O master=yarn -O masters=yarn",
            "--launcher spark has no option 'masters' → did you mean -O master=…?",
        ),
        ("--nodes 2 -O master=yarn", "how many GPUs an executor has is not known → --gpus N"),
        ("--ranks 2 -O master=yarn -O partition=a", "-O partition is an option of --launcher slurm, not of spark"),
        ("--ranks 2", "-O master is not set, this process has no Spark session with a SparkContext, and no "),
    ],
)
def test_options_that_spark_does_not_take(options: str, message: str) -> None:
    assert message in refusal(options)


@spark_is_here
def test_a_master_that_does_not_answer_is_named_with_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, two = free_ports(2)
    master = f"spark://127.0.0.1:{one},127.0.0.1:{two}"
    said = refusal(f"--ranks 2 -O master={master}")
    assert f"no Spark master answers at {master} (from -O master={master}): 127.0.0.1:{one}: Connection refused" in said
    assert f"; 127.0.0.1:{two}: Connection refused" in said
    (tmp_path / "spark-defaults.conf").write_text(f"# ours\nspark.master   spark://127.0.0.1:{one}\n")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert "(from spark-defaults.conf)" in refusal("--ranks 2")


@spark_is_here
def test_the_plan_shows_what_spark_is_asked_for() -> None:
    plan = planned(f"--ranks 4 -O master={MASTER} -O spark.executor.memory=2g").plan
    assert [node.ranks for node in plan.nodes] == [(0, 1), (2, 3)]
    request = json.loads(plan.request)
    assert (request["master"], request["tasks"]) == (MASTER, 2)
    asked = {"spark.executor.cores": "2", "spark.task.cpus": "2", "spark.cores.max": "4", "spark.executor.memory": "2g"}
    assert asked.items() <= request["settings"].items()
    plan = planned("--gpus 5 -O master=yarn -O spark.executor.resource.gpu.amount=4 -O cpus=12").plan
    assert [len(node.gpus) for node in plan.nodes] == [3, 2]
    settings = json.loads(plan.request)["settings"]
    assert (settings["spark.executor.resource.gpu.amount"], settings["spark.task.resource.gpu.amount"]) == ("3", "3")
    assert settings["spark.task.cpus"] == "12"


@pytest.mark.soak
def test_more_than_the_cluster_has_is_refused_in_sparks_words(spark_pool: DriverPool, spark: SparkCluster) -> None:
    waits = "-O spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures=3"
    job = start(spark_pool, SLEEP, f"-O master=local-cluster[1,2,1024] {waits}")
    assert job.wait(PATIENCE).state in ("failed", "lost")
    assert "requires more slots than the total number of slots in the cluster" in job.state.reason


@pytest.mark.soak
def test_an_executor_that_is_lost_ends_the_job_with_its_node(spark_pool: DriverPool, spark: SparkCluster) -> None:
    job = start(spark_pool, SLEEP)
    assert wait_until(lambda: asleep(job), PATIENCE), job.state.reason
    os.kill(spark.executors()[0], signal.SIGKILL)
    assert job.wait(PATIENCE).state in ("failed", "lost")
    assert "ExecutorLostFailure" in job.state.reason
    assert wait_until(lambda: not spark.left()), spark.left()


@pytest.mark.soak
def test_an_executor_that_is_lost_is_followed_by_a_new_application(spark_pool: DriverPool, spark: SparkCluster) -> None:
    job = start(spark_pool, AGAIN, "--restarts 1 --grace 1s")
    assert wait_until(lambda: job.logs(stream="out").count("start 0") == job.plan.world_size, PATIENCE)
    os.kill(spark.executors()[0], signal.SIGKILL)
    assert job.wait(2 * PATIENCE).state == "succeeded", job.state.reason
    assert job.value == 1
    assert any("ExecutorLostFailure" in note for note in job.state.notes), job.state.notes
    assert wait_until(lambda: not spark.left()), spark.left()


@pytest.mark.soak
def test_the_end_of_the_application_is_the_end_of_the_job(spark_pool: DriverPool, spark: SparkCluster) -> None:
    job = start(spark_pool, SLEEP)
    assert wait_until(lambda: asleep(job), PATIENCE), job.state.reason
    (java,) = spark.processes("SparkSubmit")
    os.kill(java, signal.SIGKILL)
    assert job.wait(PATIENCE).state in ("failed", "lost")
    assert "the Java process of the job's Spark application has ended" in job.state.reason
    assert wait_until(lambda: not spark.left()), spark.left()
