"""Engines of this machine, each for the session. After a test its queue is empty, and nothing runs on its nodes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.client.drivers import DriverPool
from tests.cluster import hosts, node_python
from tests.cluster.cluster import Cluster
from tests.engines import slurm as slurms
from tests.engines.kubernetes_api import KubernetesApi
from tests.engines.ray_cluster import RayCluster
from tests.engines.slurm import Slurm
from tests.engines.spark_cluster import SPARK_VARIABLES, SparkCluster
from tests.lacking import lacking
from tests.leaks import wait_until


def drivers() -> Iterator[DriverPool]:
    """They have the environment of the fixtures before."""
    made = DriverPool()
    yield made
    made.close()


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of a notebook: ``__main__`` of this process for the length of the test."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main.__dict__


@pytest.fixture(scope="session")
def controller(tmp_path_factory: pytest.TempPathFactory, lasting: set[int]) -> Iterator[Slurm]:
    """Slurm with two nodes, which are hosts of a bed: they have a Python with torch, and nothing of ours."""
    if why := hosts.refused():
        pytest.skip(f"no hosts on this machine: {why}")
    if missing := [*hosts.missing_programs(), *slurms.missing_programs()]:
        lacking(f"no {', '.join(missing)} here: make engines")
    python = node_python.make(tmp_path_factory.mktemp("node") / "python")
    shared = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # a socket's path is short
    bed = Cluster.up(tmp_path_factory.mktemp("bed"), 2, python=python, shared=[shared])
    lasting.add(bed.keeper)
    made = Slurm(bed, shared)
    try:
        made.up()
        yield made
    finally:
        made.down()
        bed.down()
        shutil.rmtree(shared, ignore_errors=True)


@pytest.fixture
def slurm(controller: Slurm, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """Kernels, drivers and commands of the test find Slurm's commands, which know the controller."""
    monkeypatch.setenv("SLURM_CONF", str(controller.conf))
    yield controller
    left: list[str] = []

    def nothing_left() -> bool:
        left[:] = [*controller.queue(), *(line for node in controller.bed.nodes for line in controller.left_on(node))]
        return not left

    wait_until(nothing_left)
    controller.clear()
    assert not left, "the test left behind:\n  " + "\n  ".join(left)


@pytest.fixture
def pool(slurm: Slurm) -> Iterator[DriverPool]:
    """Drivers that know Slurm."""
    yield from drivers()


@pytest.fixture
def no_slurm(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PATH without Slurm's commands."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.path.dirname(shutil.which('true') or '')}/nowhere")


@pytest.fixture(scope="session")
def ray_nodes(tmp_path_factory: pytest.TempPathFactory, lasting: set[int]) -> Iterator[RayCluster]:
    """Ray with two nodes, which are hosts of a bed: they have a Python with torch and Ray, and nothing of ours."""
    if why := hosts.refused():
        pytest.skip(f"no hosts on this machine: {why}")
    if importlib.util.find_spec("ray") is None:
        lacking("ray is not installed here: pip install 'jupyter_torchdist[ray]'")
    if missing := hosts.missing_programs():
        lacking(f"no {', '.join(missing)} here: make cluster")
    python = node_python.make(tmp_path_factory.mktemp("node") / "python", "ray")
    bed = Cluster.up(tmp_path_factory.mktemp("bed"), 2, python=python)
    lasting.add(bed.keeper)
    made = RayCluster(bed)
    try:
        made.up()
        lasting.update(made.processes)
        yield made
    finally:
        made.down()
        bed.down()


@pytest.fixture
def ray_cluster(ray_nodes: RayCluster, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    """Kernels, drivers and commands of the test find the cluster by ``RAY_ADDRESS``."""
    monkeypatch.setenv("RAY_ADDRESS", ray_nodes.address)
    yield ray_nodes
    left: list[str] = []

    def nothing_left() -> bool:
        left[:] = ray_nodes.left()
        return not left

    assert wait_until(nothing_left), "the test left behind:\n  " + "\n  ".join(left)


@pytest.fixture
def ray_pool(ray_cluster: RayCluster) -> Iterator[DriverPool]:
    """Drivers that know Ray."""
    yield from drivers()


@pytest.fixture(scope="session")
def kubernetes_nodes(tmp_path_factory: pytest.TempPathFactory, lasting: set[int]) -> Iterator[KubernetesApi]:
    """An API of Kubernetes that runs pods on two hosts of a bed: their image has a Python with torch."""
    if why := hosts.refused():
        pytest.skip(f"no hosts on this machine: {why}")
    if importlib.util.find_spec("kubernetes") is None:
        lacking("kubernetes is not installed here: pip install 'jupyter_torchdist[kubernetes]'")
    if missing := hosts.missing_programs():
        lacking(f"no {', '.join(missing)} here: make cluster")
    python = node_python.make(tmp_path_factory.mktemp("node") / "python")
    bed = Cluster.up(tmp_path_factory.mktemp("bed"), 2, python=python)
    lasting.add(bed.keeper)
    made = KubernetesApi(bed, tmp_path_factory.mktemp("kubernetes"))
    made.up()
    try:
        yield made
    finally:
        made.down()
        bed.down()


@pytest.fixture
def kubernetes(kubernetes_nodes: KubernetesApi, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    """Kernels, drivers and commands of the test find the cluster by ``KUBECONFIG``."""
    monkeypatch.setenv("KUBECONFIG", str(kubernetes_nodes.config))
    yield kubernetes_nodes
    left: list[str] = []

    def nothing_left() -> bool:
        left[:] = kubernetes_nodes.left()
        return not left

    assert wait_until(nothing_left), "the test left behind:\n  " + "\n  ".join(left)


@pytest.fixture
def kubernetes_pool(kubernetes: KubernetesApi) -> Iterator[DriverPool]:
    """Drivers that know Kubernetes."""
    yield from drivers()


@pytest.fixture(scope="session")
def spark_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Spark's directory: that of the package, but what applications leave there is in one of this session."""
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        lacking("pyspark is not installed here: make test-spark")
    if shutil.which("java") is None:
        lacking("no java here: make engines")
    place = tmp_path_factory.mktemp("spark")
    for folder in ("bin", "conf", "jars", "python", "sbin"):
        if (source := Path(found.origin).parent / folder).exists():
            (place / folder).symlink_to(source)
    return place


@pytest.fixture
def spark(spark_home: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SparkCluster]:
    """Kernels, drivers and commands of the test start Spark's processes, which are frugal."""
    for name, value in SPARK_VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SPARK_HOME", str(spark_home))
    made = SparkCluster(spark_home)
    yield made
    assert wait_until(lambda: not made.left()), "the test left behind:\n  " + "\n  ".join(made.left())


@pytest.fixture
def spark_pool(spark: SparkCluster) -> Iterator[DriverPool]:
    """Drivers that know Spark."""
    yield from drivers()
