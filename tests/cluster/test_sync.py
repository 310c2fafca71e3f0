"""``--sync``: a directory of the notebook's machine on every host, before the ranks start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_torchdist.client import Job, Request, submit
from jupyter_torchdist.client.drivers import DriverPool
from jupyter_torchdist.protocol.options.parsing import parse_options
from tests.cluster.cells import PATIENCE, PYTHON
from tests.cluster.cluster import Cluster
from tests.leaks import wait_until

READ = "from pathlib import Path\nprint(Path('data/a.txt').read_text(), Path('data/deep/b.bin').stat().st_size)\n"
WORDS = f"--host-option python={PYTHON} --hosts node1,node2 --ranks 2"


@pytest.fixture
def project(tmp_path: Path, cluster: Cluster) -> Iterator[Path]:
    """A notebook's directory, with data."""
    folder = tmp_path / "project"
    (folder / "data" / "deep").mkdir(parents=True)
    (folder / "data" / "a.txt").write_text("one")
    (folder / "data" / "deep" / "b.bin").write_bytes(os.urandom(2_000_000))
    yield folder
    for node in cluster.nodes:
        cluster.run(node, "rm", "-rf", str(tmp_path))


def run(pool: DriverPool, folder: Path, words: str, source: str = READ) -> Job:
    options = parse_options(f"{WORDS} {words}")
    job = submit(Request(source, "Cell In[3]", 2, options, {}, cwd=folder), pool=pool)
    job.wait(PATIENCE)
    return job


def sent(job: Job) -> list[str]:
    return [stage.text for stage in job.state.stages if stage.text.startswith("sending")]


@pytest.mark.timeout(240)
def test_only_what_changed_goes(pool: DriverPool, project: Path, cluster: Cluster) -> None:
    """The hosts do not have the notebook's directory: the data is below that of the job."""
    first = run(pool, project, "--sync data")
    assert first.state.state == "succeeded", first.state.reason
    assert [first.logs(rank, stream="out").strip() for rank in (0, 1)] == ["one 2000000"] * 2
    assert any("MB" in text for text in sent(first)), first.state.stages
    assert not any("stay on" in note for note in first.state.notes)
    (project / "data" / "a.txt").write_text("three")
    second = run(pool, project, "--sync data")
    assert [second.logs(rank, stream="out").strip() for rank in (0, 1)] == ["three 2000000"] * 2
    assert not any("MB" in text for text in sent(second)), second.state.stages
    for node in ("node1", "node2"):
        assert wait_until(lambda: not cluster.run(node, "find", "/", "-xdev", "-name", first.id).stdout, PATIENCE)  # noqa: B023


@pytest.mark.timeout(120)
def test_where_the_host_has_the_directory(pool: DriverPool, project: Path, cluster: Cluster) -> None:
    for node in ("node1", "node2"):
        cluster.run(node, "mkdir", "-p", str(project))
    job = run(pool, project, f"--sync {project}/data --sync data/deep")
    assert job.state.state == "succeeded", job.state.reason
    assert cluster.run("node2", "cat", f"{project}/data/a.txt").stdout == "one"


@pytest.mark.timeout(120)
def test_a_full_disk(pool: DriverPool, project: Path, cluster: Cluster) -> None:
    cluster.run("node2", "mkdir", "-p", f"{project}/data")
    cluster.run("node2", "mount", "-t", "tmpfs", "-o", "size=500k", "none", f"{project}/data")
    try:
        job = run(pool, project, "--sync data")
        assert job.state.state == "failed"
        assert "node2 cannot run the job: " in job.state.reason and "b.bin" in job.state.reason, job.state.reason
        # The part of a file that came is removed when the driver's connection ends, after the job.
        assert wait_until(lambda: not cluster.run("node2", "ls", "-A", f"{project}/data/deep").stdout, PATIENCE)
    finally:
        cluster.run("node2", "umount", "-l", f"{project}/data")
