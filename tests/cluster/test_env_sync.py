"""``--env-sync``: packages that only the notebook has, on hosts that reach no index. Indexes are folders of wheels."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_torchdist import capture
from jupyter_torchdist.client import Job, Request, submit
from jupyter_torchdist.client.drivers import DriverPool
from jupyter_torchdist.launchers.ssh import launcher
from jupyter_torchdist.protocol.options.parsing import parse_options
from jupyter_torchdist.verbs.parse import parse
from jupyter_torchdist.verbs.perform import perform
from tests import wheels
from tests.cluster import node_python
from tests.cluster.cells import PATIENCE, PYTHON
from tests.cluster.cluster import Cluster
from tests.cluster.resetting import reset
from tests.leaks import wait_until

ENVIRONMENTS = "/tmp/torchdist-scratch-0/envs"
TINY = "import sys, torch, tiny_thing\nprint(tiny_thing.NAME, sys.prefix, torch.__file__)\n"


@pytest.fixture(scope="module")
def like_here(python: Path, tmp_path_factory: pytest.TempPathFactory, lasting: set[int]) -> Iterator[Cluster]:
    """Hosts that have what this Python has."""
    place = node_python.make(tmp_path_factory.mktemp("like") / "python", *capture.installed())
    cluster = Cluster.up(tmp_path_factory.mktemp("hosts"), 2, python=place)
    lasting.add(cluster.keeper)
    yield cluster
    cluster.down()


@pytest.fixture
def hosts(like_here: Cluster, monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[Cluster]:
    monkeypatch.setenv("PATH", f"{like_here.bin}:{os.environ['PATH']}")
    launcher.let_go()
    yield like_here
    launcher.let_go()
    left = reset(like_here)
    for node in like_here.nodes:
        like_here.run(node, "rm", "-rf", ENVIRONMENTS)
    assert not left, left


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip finds packages."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheels.installer(folder)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of this Python's packages."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def tiny(index: Path, site: Path) -> Path:
    """A package that is here and in the index, with a module that the test may change."""
    made = wheels.wheel(index, "tiny_thing", "1.5", {"tiny_thing.py": "NAME = 'tiny 1.5'\n"})
    wheels.install(site, made)
    return made


@pytest.fixture
def pool(hosts: Cluster, index: Path) -> Iterator[DriverPool]:
    """Drivers that know the hosts and the index."""
    drivers = DriverPool()
    yield drivers
    drivers.close()


def begin(pool: DriverPool, source: str, words: str = "--hosts node1,node2 --ranks 4") -> Job:
    options = parse_options(f"--env-sync --host-option python={PYTHON} {words}")
    return submit(Request(source, "Cell In[3]", 2, options, {}), pool=pool)


def run(pool: DriverPool, source: str, words: str = "--hosts node1,node2 --ranks 4") -> Job:
    job = begin(pool, source, words)
    job.wait(PATIENCE)
    return job


def environments(cluster: Cluster, node: str) -> list[str]:
    return cluster.run(node, "ls", ENVIRONMENTS, check=False).stdout.split()


def stages(job: Job) -> list[str]:
    return [stage.text for stage in job.state.stages]


def told(line: str) -> str:
    return "".join(perform(parse(line, "torchdist")))


@pytest.mark.timeout(240)
def test_a_package_that_only_the_notebook_has(pool: DriverPool, hosts: Cluster, tiny: Path) -> None:
    first = run(pool, TINY)
    assert first.state.state == "succeeded", first.state.reason
    for rank in range(4):
        name, prefix, torch = first.logs(rank, stream="out").strip().rsplit(" ", 2)
        assert name == "tiny 1.5" and prefix.startswith(ENVIRONMENTS) and torch.startswith(str(node_python.PLACE))
    assert "getting packages for node1, node2" in stages(first)
    assert "installing packages on node1, node2" in stages(first)
    assert not any("differs" in note for note in first.state.notes), first.state.notes
    begun = time.monotonic()
    second = run(pool, TINY)
    assert second.state.state == "succeeded", second.state.reason
    assert not any("packages" in text for text in stages(second)), stages(second)
    assert time.monotonic() - begun < PATIENCE / 4
    for node in hosts.nodes:
        assert len([name for name in environments(hosts, node) if "." not in name]) == 1
    words = f"--hosts node1,node2 --host-option python={PYTHON}"
    assert told(f"nodes {words}").count("1 environment ") == 2
    assert told(f"stop {words}").count(ENVIRONMENTS) == 2
    assert environments(hosts, "node1") == []


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_two_jobs_at_once_make_one_environment(pool: DriverPool, hosts: Cluster, tiny: Path) -> None:
    jobs = [begin(pool, TINY, "--hosts node1 --ranks 1") for _ in range(2)]
    assert all(job.wait(PATIENCE).state == "succeeded" for job in jobs), [job.state.reason for job in jobs]
    prefixes = {job.logs(0, stream="out").split()[2] for job in jobs}
    assert len(prefixes) == 1
    assert hosts.run("node1", "find", ENVIRONMENTS, "-name", "whole").stdout.count("\n") == 1


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_what_was_made_in_part_is_made_anew(pool: DriverPool, hosts: Cluster, tiny: Path) -> None:
    first = run(pool, TINY, "--hosts node1 --ranks 1")
    prefix = first.logs(0, stream="out").split()[2]
    hosts.run("node1", "sh", "-c", f"rm -r {prefix}/whole {prefix}/bin; echo broken > {prefix}/pyvenv.cfg")
    again = run(pool, TINY, "--hosts node1 --ranks 1")
    assert again.state.state == "succeeded", again.state.reason
    assert again.logs(0, stream="out").split()[2] == prefix


@pytest.mark.timeout(180)
def test_a_cancel_while_an_environment_is_made(pool: DriverPool, hosts: Cluster, tiny: Path) -> None:
    """Another process has the lock, so it is not made."""
    prefix = run(pool, TINY, "--hosts node1 --ranks 1").logs(0, stream="out").split()[2]
    hosts.run("node1", "sh", "-c", f"rm {prefix}/whole; flock {prefix}.lock sleep 1000 >/dev/null 2>&1 &")
    job = begin(pool, TINY, "--hosts node1 --ranks 1")
    assert wait_until(lambda: "installing packages on node1" in stages(job), PATIENCE), stages(job)
    job.interrupt()
    assert job.wait(PATIENCE).state == "cancelled"

    def at_work() -> list[str]:
        return [line for line in hosts.processes("node1").values() if "node environment" in line]

    assert wait_until(lambda: not at_work(), PATIENCE), at_work()
    hosts.run("node1", "pkill", "sleep")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("source", [False, True])
def test_no_wheel_fits(pool: DriverPool, hosts: Cluster, index: Path, site: Path, source: bool) -> None:
    """The index has one for another machine, or sources that cannot be built."""
    wheels.install(
        site, wheels.wheel(index, "tiny_thing", "1.5", {"tiny_thing.py": "NAME = 1"}, tag="cp311-cp311-win32")
    )
    if source:
        wheels.source(index, "tiny_thing", "1.5", "def build_wheel(*_):\n    raise OSError('no compiler')\n")
    job = run(pool, TINY)
    assert job.state.state == "failed"
    assert "tiny-thing==1.5, which the cell needs, has no wheel for node1, node2" in job.state.reason, job.state.reason


@pytest.mark.soak
@pytest.mark.timeout(120)
def test_what_the_cell_does_not_need_is_left_out(
    pool: DriverPool, hosts: Cluster, index: Path, site: Path, tiny: Path
) -> None:
    wheels.install(site, wheels.wheel(index, "only_here", "3", {"only_here.py": ""}, tag="cp311-cp311-win32"))
    job = run(pool, TINY, "--hosts node1 --ranks 1")
    assert job.state.state == "succeeded", job.state.reason
    assert "--env-sync leaves out what has no wheel for node1: only-here==3" in job.state.notes


@pytest.mark.soak
@pytest.mark.timeout(120)
def test_sources_that_fit_every_machine_are_built_here(
    pool: DriverPool, hosts: Cluster, index: Path, site: Path
) -> None:
    pure = wheels.wheel(site.parent, "tiny_thing", "1.5", {"tiny_thing.py": "NAME = 'built 1.5'\n"})
    wheels.install(site, pure)
    build = f"""import shutil
def build_wheel(place, settings=None, metadata=None):
    return shutil.copy({str(pure)!r}, place).rpartition("/")[2]
"""
    wheels.source(index, "tiny_thing", "1.5", build)
    job = run(pool, TINY, "--hosts node1 --ranks 1")
    assert job.state.state == "succeeded", job.state.reason
    assert job.logs(0, stream="out").startswith("built 1.5 ")


@pytest.mark.timeout(120)
def test_a_full_disk(pool: DriverPool, hosts: Cluster, tiny: Path) -> None:
    hosts.run("node1", "mkdir", "-p", "-m", "700", ENVIRONMENTS)
    hosts.run("node1", "mount", "-t", "tmpfs", "-o", "size=16k,mode=700", "none", ENVIRONMENTS)
    try:
        job = run(pool, TINY, "--hosts node1 --ranks 1")
        assert job.state.state == "failed"
        assert "node1 cannot run the job: its environment cannot be made: " in job.state.reason, job.state.reason
        assert "No space left on device" in job.state.reason
    finally:
        hosts.run("node1", "umount", "-l", ENVIRONMENTS)


@pytest.mark.soak
@pytest.mark.timeout(120)
def test_an_index_without_pip(pool: DriverPool, hosts: Cluster, index: Path, tiny: Path) -> None:
    for file in index.glob("pip-*"):
        file.unlink()
    job = run(pool, TINY)
    assert job.state.state == "failed" and "the index has no pip for the hosts" in job.state.reason, job.state.reason
