"""``nodes`` and ``stop`` with ``--hosts``, on real hosts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_torchdist.client.drivers import DriverPool
from jupyter_torchdist.launchers.ssh import launcher
from jupyter_torchdist.protocol.errors import LaunchError
from jupyter_torchdist.store import catalog
from jupyter_torchdist.verbs.parse import parse
from jupyter_torchdist.verbs.perform import perform
from tests.cluster import node_python
from tests.cluster.cells import PATIENCE, SLEEP, start
from tests.cluster.cluster import Cluster
from tests.cluster.test_hosts import asleep
from tests.leaks import wait_until

PYTHON = node_python.PLACE / "bin/python"
WRITE = "from pathlib import Path\nPath('mine.txt').write_text('x')\nprint(Path.cwd(), flush=True)\n"


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> Iterator[Path]:
    """A notebook's directory whose ``torchdist.toml`` says where Python is on the hosts."""
    (tmp_path / "torchdist.toml").write_text(f'[hosts]\npython = "{PYTHON}"\nboth = ["node1", "node2"]\n')
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    launcher.let_go()


def said(line: str) -> str:
    return "".join(perform(parse(line, "%dist")))


def ours(cluster: Cluster, node: str) -> list[str]:
    """Root's files and directories there with our name: ``stop`` leaves those of other users."""
    skipped = ("(", "-path", "/proc", "-o", "-path", "/sys", ")", "-prune", "-o")
    named = ("-user", "root", "-name", "*torchdist*", "-print")
    return cluster.run(node, "find", "/", *skipped, *named, check=False).stdout.split()


def programs(cluster: Cluster, node: str) -> list[str]:
    return [line for line in cluster.processes(node).values() if "torchdist" in line]


def test_every_host_has_its_row(cluster: Cluster) -> None:
    cluster.poweroff("node3")
    rows = said("nodes --hosts @both,node9,node3 --host-option node2.python=/usr/bin/python3").splitlines()
    assert rows[0].split() == ["HOST", "GPUS", "CORES", "MEMORY", "DISK", "KEPT", "CLOCK", "TORCH", "PYTHON", "STATE"]
    assert re.fullmatch(
        rf"node1 +none +\d+ +\S+ GB +\S+ [GT]B +(nothing|\S+ \w+) +same +2\S+ +3\.\S+ {PYTHON} +ready", rows[1]
    )
    assert "node2" in rows[2] and "has no torch in /usr/bin/python3" in rows[2]
    assert "node9" in rows[3] and "Could not resolve" in rows[3] and "→ check the name" in rows[3]
    assert rows[4].startswith("node3 ") and "ready" not in rows[4]
    assert len(rows) == 5


def test_doctor_examines_hosts_and_reduces_over_them(cluster: Cluster) -> None:
    cluster.poweroff("node3")
    text = said("doctor --hosts @both,node3")
    assert "fault    reached: node3: " in text
    assert "fine     reached: node1, node2\n" in text
    assert re.search(r"^fine     torch: torch 2\.\d+", text, re.M)
    assert "fine     network: MTU 1500\n" in text and "fine     interface: eth0" in text
    assert re.search(r"^(fine|warning) +all-reduce: gloo, 2 ranks, 16 MiB: \d+\.\d\d GB/s on the bus", text, re.M), text
    assert re.search(r"^1 fault", text.splitlines()[-1])
    assert catalog.jobs() == []


@pytest.mark.soak
def test_doctor_says_why_hosts_do_not_meet(cluster: Cluster) -> None:
    cluster.run("node2", "ip", "link", "set", "dev", "eth0", "mtu", "1400")
    cluster.firewall("node1", "1024-65535")
    try:
        text = said("doctor --hosts @both")
    finally:
        cluster.run("node2", "ip", "link", "set", "dev", "eth0", "mtu", "1500")
    assert "fault    network: node2 has MTU 1400; node1: MTU 1500\n         → " in text
    assert re.search(r"^fault    all-reduce: .*\n         node2 cannot reach node1's store", text, re.M), text
    assert text.endswith("\n2 faults\n")
    assert [job.state for job in catalog.jobs()] == ["failed"]


def test_stop_waits_for_jobs_and_leaves_what_cells_wrote(pool: DriverPool, cluster: Cluster) -> None:
    job = start(pool, WRITE + SLEEP, "--hosts node1 --ranks 1 --host-option bring=0")
    assert wait_until(lambda: asleep(job), PATIENCE)
    rows = said("nodes --hosts @both").splitlines()
    assert rows[1].endswith(f"runs {job.id}") and rows[2].endswith("ready")
    with pytest.raises(LaunchError, match=f"node1 runs job {job.id}; nothing was removed there"):
        said("stop --hosts node1")
    assert job.state.state == "running"
    job.kill()
    assert job.wait(PATIENCE).state == "cancelled"
    work = Path(job.logs(0, stream="out").split()[0])
    text = said("stop --hosts @both")
    assert "node1: ended 1 warm process, removed\n  /" in text and f"  kept: {work}\n" in text
    assert ours(cluster, "node2") == []
    assert ours(cluster, "node1") == [str(work.parents[2])]
    assert cluster.run("node1", "find", str(work.parents[2]), "-type", "f").stdout.split() == [str(work / "mine.txt")]
    assert wait_until(lambda: not programs(cluster, "node1"), PATIENCE)
    cluster.run("node1", "rm", "-r", str(work.parents[2]))


def test_stop_goes_on_when_a_host_fails(cluster: Cluster) -> None:
    said("nodes --hosts node1")
    assert ours(cluster, "node1")
    pieces = perform(parse("stop --hosts node9,node1", "%dist"))
    assert next(pieces).startswith("node1: ended ")
    with pytest.raises(LaunchError, match=r"node9: .*resolve"):
        next(pieces)
    assert ours(cluster, "node1") == []


def test_a_stopped_host_is_reached_anew(cluster: Cluster) -> None:
    """The channels that a notebook keeps were closed. ``nodes`` starts no warm process."""
    said("stop --hosts node1")
    for _ in range(2):
        assert "ready" in said("nodes --hosts node1")
        assert "node1: ended 0 warm processes, removed" in said("stop --hosts node1")
    assert ours(cluster, "node1") == []
