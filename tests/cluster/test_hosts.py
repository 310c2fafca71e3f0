"""A cell on hosts over SSH: what it prints, returns and raises; its end on request; faults of hosts and network."""

from __future__ import annotations

import os
import sys
import time
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.client import Job
from jupyter_torchdist.client.drivers import DriverPool
from jupyter_torchdist.driver.links import LOST_SECONDS
from jupyter_torchdist.launchers.ssh import launcher
from jupyter_torchdist.protocol.errors import LaunchError, TorchDistError
from jupyter_torchdist.protocol.process import job_token_of
from tests.cluster.cells import MEET, PATIENCE, SLEEP, kill_driver, start
from tests.cluster.cluster import Cluster
from tests.cluster.resetting import end_masters
from tests.leaks import wait_until

COUNT = MEET + "import time\nfor i in range(COUNT):\n    print('line', i, flush=True)\n    time.sleep(0.05)\n"


def assert_whole(job: Job, count: int) -> None:
    """Every rank's lines are here, in order, once."""
    for rank in range(job.plan.world_size):
        counted = [line.split()[-1] for line in lines(job, rank) if line.startswith("line ") or "] line " in line]
        assert counted == [str(i) for i in range(count)]


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of a notebook: ``__main__`` of this process for the length of the test."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main.__dict__


def lines(job: Job, rank: int) -> list[str]:
    return job.logs(rank, stream="out").splitlines()


def asleep(job: Job) -> bool:
    return job.logs(stream="out").count("asleep") == job.plan.world_size


def test_ranks_of_two_hosts_meet_and_their_values_come_back(pool: DriverPool, notebook: dict[str, Any]) -> None:
    exec("import torch\nweights = torch.zeros(3)", notebook)
    job = start(pool, MEET + "weights += total\nfloat(weights.sum())", names=notebook)
    assert job.wait(PATIENCE).state == "succeeded"
    for rank in range(4):
        assert f"rank {rank} on node{rank // 2 + 1} sum 6.0" in job.logs(rank)
    job.bring(notebook)
    assert notebook["weights"].tolist() == [6.0, 6.0, 6.0]
    assert job.value == 18.0


WRITE = """
import os, socket
os.makedirs("deep/er")
open("deep/er/a.txt", "w").write(socket.gethostname())
open("empty", "w").close()
open("rank-00000.events", "w").write("no event")
open("big.bin", "wb").write(bytes(BIG))
os.symlink("/etc/hostname", "link")
print(os.getcwd())
"""


def test_files_that_the_cell_writes_come_back(pool: DriverPool, cluster: Cluster) -> None:
    source = WRITE.replace("BIG", "3_000_000")
    job = start(pool, source, "--hosts node1,node2 --ranks 2 --host-option bring=1M --host-option node2.bring=10M")
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason
    came = {str(file.relative_to(job.paths.work)) for file in job.paths.work.rglob("*") if file.is_file()}
    small = {"deep/er/a.txt", "empty", "rank-00000.events"}
    assert came == {f"{node}/{name}" for node in ("node1", "node2") for name in small} | {"node2/big.bin"}
    assert (job.paths.work / "node2" / "deep" / "er" / "a.txt").read_text() == "node2"
    assert (job.paths.work / "node2" / "big.bin").read_bytes() == bytes(3_000_000)
    for node, left in (("node1", {"big.bin", "link"}), ("node2", {"link"})):
        where = job.logs(0 if node == "node1" else 1, stream="out").strip()
        assert wait_until(partial(holds, cluster, node, where, left), PATIENCE)
        cluster.run(node, "rm", "-r", where)
        assert any(f"on {node} are in {job.paths.work / node}: " in note for note in job.state.notes)
        assert any(f"stay on {node} in {where}: " in note for note in job.state.notes)


def holds(cluster: Cluster, node: str, folder: str, names: set[str]) -> bool:
    found = cluster.run(node, "find", folder, "!", "-type", "d").stdout.split()
    return {Path(path).name for path in found} == names


@pytest.mark.soak
def test_files_of_the_cell_are_whole_after_the_connection_broke(pool: DriverPool, cluster: Cluster) -> None:
    cluster.limit("node1", 8)
    job = start(pool, WRITE.replace("BIG", "5_000_000"), "--hosts node1 --ranks 1")
    assert wait_until(lambda: (job.paths.work / "node1" / "big.bin").exists(), PATIENCE)
    cluster.drop_ssh("node1")
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason
    assert (job.paths.work / "node1" / "big.bin").read_bytes() == bytes(5_000_000)
    cluster.run("node1", "rm", "-r", job.logs(0, stream="out").strip())


def test_an_exception_of_another_host_is_the_notebooks(pool: DriverPool) -> None:
    job = start(pool, MEET + "if dist.get_rank() == 3:\n    raise LookupError('on node2')\ndist.barrier()\n")
    assert job.wait(PATIENCE).state == "failed"
    assert job.state.first_failure == 3
    assert job.state.ranks[3].host == "node2"
    with pytest.raises(LookupError, match="on node2"):
        job.raise_for_state()


def test_a_cancel_ends_the_ranks_of_every_host(pool: DriverPool, cluster: Cluster) -> None:
    job = start(pool, SLEEP, "--hosts node1,node2 --ranks 4 --grace 1s")
    assert wait_until(lambda: asleep(job), PATIENCE)
    job.interrupt()
    assert job.wait(PATIENCE).state == "cancelled"


def test_a_host_that_is_switched_off_ends_the_job(pool: DriverPool, cluster: Cluster) -> None:
    job = start(pool, SLEEP)
    assert wait_until(lambda: asleep(job), PATIENCE)
    cluster.poweroff("node2")
    assert job.wait(PATIENCE).state in ("lost", "failed")
    assert "node2" in job.state.reason


def test_no_line_is_lost_when_the_connection_breaks(pool: DriverPool, cluster: Cluster) -> None:
    job = start(pool, COUNT.replace("COUNT", "60"))
    assert wait_until(lambda: "line 10" in job.logs(3), PATIENCE)
    cluster.drop_ssh("node2")
    assert job.wait(PATIENCE).state == "succeeded"
    assert_whole(job, 60)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--hosts node9 --ranks 1", r"node9: .*resolve"),
        ("--hosts node1,node2 --ranks 1", "2 hosts need more than 1 ranks"),
        ("--hosts node1 --ranks 1 --host-option python=/usr/bin/python3", "node1 has no torch in /usr/bin/python3"),
        ("--hosts node1,node1 --ranks 2", "node1 stands there 2 times"),
        ("--hosts @big --ranks 2", "there is no group @big"),
    ],
)
def test_what_cannot_start_is_told_before(pool: DriverPool, options: str, words: str) -> None:
    with pytest.raises(TorchDistError, match=words):
        start(pool, MEET, options)


def test_an_unknown_host_key_is_refused_with_the_command(pool: DriverPool, cluster: Cluster) -> None:
    known = cluster.ssh_config.with_name("known_hosts")
    text = known.read_text()
    known.write_text("")
    try:
        with pytest.raises(LaunchError, match="node1: Host key verification failed") as caught:
            start(pool, MEET, "--hosts node1 --ranks 1")
    finally:
        known.write_text(text)
    assert "run `ssh node1` once" in caught.value.hint


def test_a_key_that_is_not_accepted_is_told(pool: DriverPool, cluster: Cluster) -> None:
    with pytest.raises(LaunchError, match=r"ghost@node1: .*Permission denied") as caught:
        start(pool, MEET, "--hosts ghost@node1 --ranks 1")
    assert "ssh -fNM -S" in caught.value.hint


@pytest.mark.parametrize("stage", ["upload", "rendezvous"])
def test_a_cancel_during_the_start_ends_all(pool: DriverPool, cluster: Cluster, stage: str) -> None:
    """During the upload, no rank is ever started; a host that cannot reach the first one is ended, too."""
    import numpy as np

    names = {"data": np.random.default_rng(0).bytes(40_000_000)} if stage == "upload" else {}
    if stage == "upload":
        cluster.limit("node2", 20)
    job = start(pool, SLEEP + "data\n" if names else SLEEP, names=names)

    def left() -> str:
        return " ".join(n for n in ("node1", "node2") if cluster.run(n, "find", "/tmp", "-name", job.id).stdout)

    if stage == "upload":
        assert wait_until(lambda: "node2" in left(), PATIENCE)
    job.kill()
    assert job.wait(PATIENCE).state == "cancelled"
    assert not any(rank.ready for rank in job.state.ranks.values())
    assert wait_until(lambda: not left(), PATIENCE)


def test_a_driver_that_is_killed_is_followed_by_another(pool: DriverPool, cluster: Cluster) -> None:
    job = start(pool, COUNT.replace("COUNT", "80"))
    assert wait_until(lambda: "line 10" in job.logs(3), PATIENCE)
    kill_driver(job)
    assert job.wait(PATIENCE).state == "succeeded"
    assert_whole(job, 80)


@pytest.mark.parametrize(
    ("option", "state", "reason"),
    [
        ("--lease 2s", "failed", "--lease"),
        pytest.param("--timeout 15s", "timed_out", "--timeout 15s", marks=pytest.mark.soak),
    ],
)
def test_ranks_without_a_driver_end_in_time_and_their_logs_stay(
    pool: DriverPool, cluster: Cluster, option: str, state: str, reason: str
) -> None:
    job = start(pool, SLEEP, f"--hosts node1,node2 --ranks 4 {option} --grace 1s")
    assert wait_until(lambda: asleep(job), PATIENCE)
    kill_driver(job)
    assert wait_until(lambda: not any(ranks_on(cluster, node.host) for node in job.plan.nodes), PATIENCE)
    end = job.wait(PATIENCE)
    assert end.state == state
    assert reason in end.reason
    assert asleep(job)


def ranks_on(cluster: Cluster, node: str) -> list[str]:
    return [command for pid, command in cluster.processes(node).items() if job_token_of(pid)]


def test_two_jobs_at_once_on_the_same_hosts(pool: DriverPool, cluster: Cluster) -> None:
    """The end of one is not the other's."""
    first, second = start(pool, SLEEP), start(pool, SLEEP)
    assert wait_until(lambda: asleep(first) and asleep(second), PATIENCE)
    assert all("sum 6.0" in job.logs(rank) for job in (first, second) for rank in range(4))
    first.kill()
    assert first.wait(PATIENCE).state == "cancelled"
    assert all(rank.state == "running" for rank in second.state.ranks.values())
    assert ranks_on(cluster, "node2")
    second.kill()
    assert second.wait(PATIENCE).state == "cancelled"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_eight_hosts(
    pool: DriverPool, python: Path, tmp_path: Path, lasting: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Cluster.up(tmp_path / "bed", 8, python=python)
    lasting.add(bed.keeper)
    monkeypatch.setenv("PATH", f"{bed.bin}:{os.environ['PATH']}")
    options = f"--hosts {','.join(bed.nodes)} --ranks 8"
    try:
        for _ in range(3):
            job = start(pool, MEET, options)
            assert job.wait(3 * PATIENCE).state == "succeeded", job.state.reason
            for rank, node in enumerate(bed.nodes):
                assert f"rank {rank} on {node} sum 28.0" in job.logs(rank)
        job = start(pool, SLEEP, options)
        assert wait_until(lambda: asleep(job), PATIENCE)
        job.kill()
        assert job.wait(PATIENCE).state == "cancelled"
        assert not any(ranks_on(bed, node) for node in bed.nodes)
    finally:
        launcher.let_go()
        end_masters(bed)
        bed.down()


@pytest.mark.soak
def test_nothing_is_decided_while_no_host_answers(pool: DriverPool, cluster: Cluster) -> None:
    """Longer than a host may be silent when another one answers."""
    job = start(pool, COUNT.replace("COUNT", "1000"))
    assert wait_until(lambda: "line 10" in job.logs(3), PATIENCE)
    for node in ("node1", "node2"):
        cluster.partition("caller", node)
    began = time.monotonic()
    assert wait_until(lambda: "cannot be reached" in " ".join(job.state.notes), PATIENCE)
    assert wait_until(lambda: time.monotonic() - began > LOST_SECONDS + 5)
    assert not job.state.final
    cluster.heal()
    assert job.wait(120).state == "succeeded"
    assert_whole(job, 1000)
