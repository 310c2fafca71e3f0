"""A cluster for the session. After each test its hosts are on and the network is whole, and nothing is left on them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_torchdist.client.drivers import DriverPool
from jupyter_torchdist.launchers.ssh import launcher
from tests.cluster import node_python
from tests.cluster.cluster import Cluster
from tests.cluster.hosts import missing_programs, refused
from tests.cluster.resetting import PATIENCE, reset
from tests.conftest import FAILED
from tests.lacking import lacking


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For ``Cluster.up``. Skips the tests where no host can be."""
    if why := refused():
        pytest.skip(f"no hosts on this machine: {why}")
    if missing := missing_programs():
        lacking(f"no {', '.join(missing)} here: make cluster")
    return node_python.make(tmp_path_factory.mktemp("node") / "python")


@pytest.fixture(scope="session")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all hosts and this machine write to."""
    return tmp_path_factory.mktemp("everywhere")


@pytest.fixture(scope="session")
def bed(
    python: Path, everywhere: Path, tmp_path_factory: pytest.TempPathFactory, lasting: set[int]
) -> Iterator[Cluster]:
    """The hosts of all tests."""
    folder, others = tmp_path_factory.mktemp("cluster"), node_python.installations()
    cluster = Cluster.up(folder, python=python, shared=[everywhere], read_only=others)
    lasting.add(cluster.keeper)
    yield cluster
    cluster.down()


@pytest.fixture(autouse=True)
def home(request: pytest.FixtureRequest, home: Path, bed: Cluster) -> Iterator[Path]:
    """``TORCHDIST_HOME``; and kernels, drivers and commands of this test find an ``ssh`` that knows the hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{bed.bin}:{os.environ['PATH']}")
        for variable in ("SSH_AUTH_SOCK", "SSH_AGENT_PID", "SSH_ASKPASS"):
            patch.delenv(variable, raising=False)
        yield home
    failed = request.node.stash.get(FAILED, False)
    left = reset(bed, patience=0 if failed else PATIENCE)
    assert failed or not left, "the test left behind:\n  " + "\n  ".join(left)


@pytest.fixture
def cluster(bed: Cluster, home: Path) -> Cluster:
    """Three hosts: node1, node2 and node3."""
    return bed


@pytest.fixture
def pool(cluster: Cluster) -> Iterator[DriverPool]:
    """Drivers that know the hosts."""
    drivers = DriverPool()
    yield drivers
    drivers.close()
    launcher.let_go()
