"""What two hosts share, and what two versions of ours share on one host."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import jupyter_torchdist
from jupyter_torchdist.client.drivers import DriverPool
from jupyter_torchdist.launchers.ssh import launcher
from tests.cluster.cells import MEET, PATIENCE, start
from tests.cluster.cluster import Cluster
from tests.cluster.laptop import Laptop
from tests.cluster.resetting import end_masters
from tests.leaks import wait_until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]


def test_a_scratch_that_two_hosts_share(pool: DriverPool, cluster: Cluster, everywhere: Path) -> None:
    """As a home directory of a cluster is. Each host has its own place in it, also for data that both need."""
    scratch = everywhere / "scratch"
    data = random.Random(0).randbytes(20_000_000)
    source = f"{MEET}\nimport os\nprint(hash(data) and len(data), os.getcwd())"
    try:
        for _ in range(2):
            options = f"--hosts node1,node2 --ranks 4 --host-option scratch={scratch}"
            job = start(pool, source, options, names={"data": data})
            assert job.wait(PATIENCE).state == "succeeded", (job.state.reason, job.logs())
            for rank in range(4):
                assert f"20000000 {scratch}/node{rank // 2 + 1}/jobs/" in job.logs(rank), job.logs(rank)
    finally:
        assert wait_until(lambda: removed(scratch), PATIENCE)


def removed(folder: Path) -> bool:
    """Agents may still write there."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


@pytest.fixture
def other(tmp_path: Path, cluster: Cluster) -> Iterator[Laptop]:
    """A laptop with another version of this package."""
    package = tmp_path / "other" / "jupyter_torchdist"
    skipped = shutil.ignore_patterns("__pycache__", "labextension", "static")
    shutil.copytree(Path(jupyter_torchdist.__file__).parent, package, ignore=skipped)
    with (package / "node/agent.py").open("a") as file:
        file.write("# another version\n")
    laptop = Laptop()
    laptop.environ["PYTHONSAFEPATH"] = "1"  # else the working directory, which has this version, would come first
    laptop.environ["PYTHONPATH"] = f"{package.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    yield laptop
    launcher.let_go()
    end_masters(cluster)
    laptop.close()


def agents(cluster: Cluster) -> int:
    return sum("jupyter_torchdist.node agent" in command for command in cluster.processes("node1").values())


def test_agents_of_two_versions_at_once(pool: DriverPool, cluster: Cluster, other: Laptop, tmp_path: Path) -> None:
    """Each version has its own agent, and neither ends a job of the other."""
    script = tmp_path / "wait.py"
    script.write_text(f"{MEET}\nimport sys, time\nsys.stdout.flush()\nwhile True: time.sleep(0.05)\n")
    theirs = other.run("run", "--hosts", "node1,node2", "--ranks", "2", "--background", str(script))
    assert theirs.returncode == 0, theirs.stderr
    second = other.job(theirs.stdout.strip())
    assert wait_until(lambda: "sum 1.0" in second.logs(1), PATIENCE), (second.state, second.logs())
    first = start(pool, MEET, "--hosts node1,node2 --ranks 2")
    assert first.wait(PATIENCE).state == "succeeded", first.state.reason
    assert agents(cluster) == 2
    assert {rank.state for rank in second.state.ranks.values()} == {"running"}
    second.kill()
    assert second.wait(PATIENCE).state == "cancelled"
