"""Jobs on hosts while no driver is connected: who notices that a host is gone, and who does not."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jupyter_torchdist.client import Job
from jupyter_torchdist.client.drivers import DriverPool
from jupyter_torchdist.launchers.ssh import launcher
from jupyter_torchdist.node.unattended.neighbours import BEAT_SECONDS, PATIENCE_SECONDS
from jupyter_torchdist.protocol.process import job_token_of
from tests.cluster.cells import MEET, PATIENCE, kill_driver, start
from tests.cluster.cluster import Cluster
from tests.cluster.resetting import end_masters
from tests.leaks import wait_until

TWO = "--hosts node1,node2 --ranks 2"
NOTICED = PATIENCE_SECONDS + 10.0
"""Seconds from a host's death to the end of the others' ranks, on a busy machine."""

STEPS = (
    MEET
    + """
import pathlib, time
step, enough = 0, torch.zeros(1)
while enough < dist.get_world_size():
    enough = torch.ones(1) * pathlib.Path("/srv/enough").exists()
    dist.all_reduce(enough)
    step += 1
    print("step", step, flush=True)
    time.sleep(0.1)
step
"""
)
"""Ranks that need each other in every step, until all have a file."""


@pytest.fixture
def enough(cluster: Cluster) -> Iterator[Callable[[], None]]:
    """Let the ranks of ``STEPS`` come to their end."""

    def touch() -> None:
        for node in ("node1", "node2"):
            cluster.write(node, "/srv/enough", "")

    yield touch
    cluster.start("node1", "node2")
    for node in ("node1", "node2"):
        cluster.run(node, "rm", "-f", "/srv/enough")


def ranks_on(cluster: Cluster, node: str) -> list[int]:
    return [pid for pid in cluster.processes(node) if job_token_of(pid)]


def begin(pool: DriverPool, options: str = TWO, source: str = STEPS) -> Job:
    """A job in whose cell all ranks are."""
    job = start(pool, source, options)
    assert wait_until(lambda: all("step 3\n" in job.logs(rank, stream="out") for rank in (0, 1)), PATIENCE)
    return job


@pytest.mark.soak
@pytest.mark.parametrize(("gone", "left"), [("node2", "node1"), ("node1", "node2")])
def test_a_host_that_dies_ends_the_ranks_of_the_other_one(
    pool: DriverPool, cluster: Cluster, gone: str, left: str
) -> None:
    job = begin(pool)
    kill_driver(job)
    cluster.poweroff(gone)
    began = time.monotonic()
    assert ranks_on(cluster, left)
    assert wait_until(lambda: not ranks_on(cluster, left), NOTICED)
    assert time.monotonic() - began > PATIENCE_SECONDS / 2
    state = job.wait(PATIENCE)
    assert (state.state, state.reason) == ("failed", f"{gone} was lost while no driver was connected")
    [finding] = state.findings
    assert (finding.code, finding.node) == ("host-lost", gone)
    assert finding.sentence == f"{left} heard nothing of {gone} for 15 s, so the ranks were ended."


def throw_nonsense(cluster: Cluster, node: str) -> None:
    """At every port of UDP there, from another machine that can reach it."""
    ports = cluster.listening(node)
    assert ports, "nobody listens for the other hosts"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for port in ports:
            for data in (b"", b"\x00" * 1000, b"{}" * 30, bytes(range(256)) * 30):
                stranger.sendto(data, (cluster.address(node), port))


@pytest.mark.soak
def test_a_partition_that_heals_in_time_changes_nothing_and_nonsense_is_dropped(
    pool: DriverPool, cluster: Cluster, enough: Callable[[], None]
) -> None:
    """And hosts that are all there go on without a driver, longer than a silent one may."""
    job = begin(pool)
    kill_driver(job)
    away = time.monotonic()
    throw_nonsense(cluster, "node1")
    cluster.partition("node1", "node2")
    time.sleep(PATIENCE_SECONDS / 2)
    cluster.heal()
    assert wait_until(lambda: time.monotonic() - away > 2 * PATIENCE_SECONDS, 3 * PATIENCE_SECONDS)
    assert ranks_on(cluster, "node1")
    assert ranks_on(cluster, "node2")
    enough()
    assert wait_until(lambda: not ranks_on(cluster, "node1") and not ranks_on(cluster, "node2"), PATIENCE)
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason
    assert isinstance(job.value, int)
    assert job.value > 50


FAIL = (
    MEET
    + """
import pathlib, time
print("step 3", flush=True)
while not pathlib.Path("/srv/enough").exists():
    time.sleep(0.05)
if dist.get_rank() == 1:
    raise LookupError("on node2")
while True:
    time.sleep(0.05)
"""
)
"""Rank 0 needs nobody any more, so nothing tells it that rank 1 has failed."""


def test_a_rank_that_fails_ends_those_of_the_other_host(
    pool: DriverPool, cluster: Cluster, enough: Callable[[], None]
) -> None:
    job = begin(pool, f"{TWO} --grace 1s", FAIL)
    kill_driver(job)
    enough()
    assert wait_until(lambda: not ranks_on(cluster, "node1"), PATIENCE)
    assert job.wait(PATIENCE).state == "failed"
    assert job.state.first_failure == 1
    assert "LookupError: on node2" in job.state.reason


def test_hosts_that_do_not_hear_each_other_are_told_at_the_start(
    pool: DriverPool, cluster: Cluster, enough: Callable[[], None]
) -> None:
    cluster.firewall("node1", "1024-65535", "udp")
    job = begin(pool)
    assert wait_until(lambda: bool(job.state.notes), PATIENCE)
    enough()
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason
    [note] = [note for note in job.state.notes if "does not hear" in note]
    assert note.startswith(f"node2 does not hear node1: nothing comes from {cluster.address('node1')}, port ")
    assert "--lease" in note


def agent_on(cluster: Cluster, node: str) -> int:
    """0 while there is none."""
    return next((pid for pid, command in cluster.processes(node).items() if ".node agent " in command), 0)


def joined(cluster: Cluster) -> bool:
    """Whether the agents of both hosts hear each other's beats, the only datagrams there."""
    before = [datagrams(cluster, node) for node in ("node1", "node2")]
    time.sleep(2 * BEAT_SECONDS)
    return all(datagrams(cluster, node) > count for node, count in zip(("node1", "node2"), before, strict=True))


def datagrams(cluster: Cluster, node: str) -> int:
    """How many the processes of a host have received."""
    table = Path(f"/proc/{cluster.pid(node)}/net/snmp").read_text()
    names, values = (line.split() for line in table.splitlines() if line.startswith("Udp:"))
    return int(dict(zip(names, values, strict=True))["InDatagrams"])


@pytest.mark.soak
@pytest.mark.parametrize("node", ["node1", "node2"])
def test_an_agent_that_replaced_another_one_hears_the_others(pool: DriverPool, cluster: Cluster, node: str) -> None:
    job = begin(pool)
    assert wait_until(lambda: joined(cluster), PATIENCE)
    old = agent_on(cluster, node)
    os.kill(old, signal.SIGKILL)
    assert wait_until(lambda: agent_on(cluster, node) not in (0, old) and joined(cluster), PATIENCE)
    time.sleep(3 * BEAT_SECONDS)
    kill_driver(job)
    cluster.poweroff("node2")
    assert wait_until(lambda: not ranks_on(cluster, "node1"), NOTICED)
    assert job.wait(PATIENCE).reason == "node2 was lost while no driver was connected"


@pytest.mark.soak
def test_a_host_that_is_on_again_before_a_driver_comes(pool: DriverPool, cluster: Cluster) -> None:
    """Its ranks and files are gone all the same."""
    job = begin(pool)
    kill_driver(job)
    cluster.poweroff("node2")
    assert wait_until(lambda: not ranks_on(cluster, "node1"), NOTICED)
    cluster.start("node2")
    state = job.wait(PATIENCE)
    assert (state.state, state.reason) == ("failed", "node2 was lost while no driver was connected")


def end_logins(cluster: Cluster, node: str) -> None:
    """As logind does with ``KillUserProcesses=yes``, when the last login of the user ends: SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in cluster.processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(0.5)
    assert wait_until(lambda: not cluster.processes(node), PATIENCE)


@pytest.mark.parametrize("setting", ["yes", pytest.param("", marks=pytest.mark.soak)])
def test_logins_whose_end_kills_everything(pool: DriverPool, cluster: Cluster, setting: str) -> None:
    """The laptop is closed, so the logins end. Nothing of ours outlives that; whoever comes back reads why."""
    folder, lines = "/etc/systemd/logind.conf.d", f"[Login]\nKillUserProcesses={setting}\n"
    cluster.run("node1", "mkdir", "-p", folder)
    cluster.write("node1", f"{folder}/ours.conf", lines if setting else "")
    try:
        job = begin(pool)
        kill_driver(job)
        launcher.let_go()
        end_masters(cluster)
        for node in ("node1", "node2"):
            end_logins(cluster, node)
        state = job.wait(PATIENCE)
    finally:
        cluster.run("node1", "rm", "-f", f"{folder}/ours.conf")
    assert state.state == "failed"
    words = "everything of the job on node1 was killed from outside, our agent too"
    logind = (
        ": logind does so when your last login there ends (KillUserProcesses=yes). `loginctl enable-linger` there lets "
        "a job outlive it; then run the cell again"
    )
    other = ", or the host was started again. See what ended it there, then run the cell again"
    assert words + (logind if setting else other) in state.reason, state.reason
