"""How a driver reaches the agents of hosts: by a forwarded socket, or by a session where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from jupyter_torchdist.client import Job
from jupyter_torchdist.client.drivers import DriverPool
from jupyter_torchdist.launchers.ssh import launcher
from jupyter_torchdist.launchers.ssh.connection import shared_connection
from jupyter_torchdist.protocol.errors import LaunchError
from jupyter_torchdist.protocol.paths import runtime_dir
from tests.cluster.cells import PATIENCE, SLEEP, kill_driver, start
from tests.cluster.cluster import Cluster
from tests.cluster.resetting import end_masters, masters
from tests.leaks import wait_until

WAIT = SLEEP.replace("while True", "import pathlib\nwhile not pathlib.Path('/srv/enough').exists()")
TWO = "--hosts node1,node2 --ranks 2"


@pytest.fixture
def undo(cluster: Cluster) -> Iterator[ExitStack]:
    """What makes everything as it was."""
    with ExitStack() as stack:
        yield stack


def relays(cluster: Cluster, node: str) -> int:
    """Sessions of ssh that lead to the agent. One is the notebook's."""
    return sum(" relay" in command for command in cluster.processes(node).values() if "python" in command)


def begin(pool: DriverPool) -> Job:
    job = start(pool, WAIT, TWO)
    assert wait_until(lambda: job.logs(stream="out").count("asleep") == 2, PATIENCE), job.state.reason
    return job


def end(job: Job) -> None:
    job.kill()
    assert job.wait(PATIENCE).state == "cancelled"


def sessions_of_a_job(pool: DriverPool, cluster: Cluster) -> list[int]:
    """On each of two hosts."""
    job = begin(pool)
    found = [relays(cluster, node) - 1 for node in ("node1", "node2")]
    end(job)
    return found


def forward_sockets() -> list[Path]:
    return list(runtime_dir().glob("to-*"))


def test_a_job_needs_no_process_for_its_connection_and_leaves_no_socket(pool: DriverPool, cluster: Cluster) -> None:
    assert sessions_of_a_job(pool, cluster) == [0, 0]
    assert len(forward_sockets()) == 2
    launcher.let_go()
    assert not forward_sockets()


def forbid_on_the_host(cluster: Cluster, undo: ExitStack) -> None:
    path = "/etc/ssh/authorized_keys"
    for node in cluster.nodes:
        text = cluster.run(node, "cat", path).stdout
        undo.callback(cluster.write, node, path, text)
        cluster.write(node, path, f"no-port-forwarding {text}")


def as_a_client(cluster: Cluster, undo: ExitStack, line: str) -> None:
    """The program ssh does this line of sh first."""
    program = cluster.bin / "ssh"
    text = program.read_text()
    undo.callback(program.write_text, text)
    program.write_text(text.replace("\n", f"\n{line}\n", 1))


def lack_it_here(cluster: Cluster, undo: ExitStack) -> None:
    """As an OpenSSH that knows no forwarding of sockets."""
    as_a_client(cluster, undo, 'case "$*" in *" -O forward "*) exit 255;; esac')


@pytest.mark.parametrize("refuse", [forbid_on_the_host, pytest.param(lack_it_here, marks=pytest.mark.soak)])
def test_where_no_socket_is_forwarded_a_job_has_sessions(
    pool: DriverPool, cluster: Cluster, undo: ExitStack, refuse: Callable[[Cluster, ExitStack], None]
) -> None:
    refuse(cluster, undo)
    assert sessions_of_a_job(pool, cluster) == [1, 1]


def test_a_connection_that_the_user_shares_is_used(pool: DriverPool, cluster: Cluster, undo: ExitStack) -> None:
    text = cluster.ssh_config.read_text()
    undo.callback(cluster.ssh_config.write_text, text)
    mine = cluster.layout.directory / "mine"
    mine.mkdir()
    undo.callback(shutil.rmtree, mine)
    undo.callback(end_masters, cluster)
    shares = "ControlMaster auto\nControlPersist 60\nControlPath {0}/%n\nLocalForward {0}/forward /run/x\n"
    cluster.ssh_config.write_text(f"Host *\n{shares.format(mine)}{text}")
    shared_connection.cache_clear()
    undo.callback(shared_connection.cache_clear)
    assert sessions_of_a_job(pool, cluster) == [0, 0]
    assert {path.parent for path in masters(cluster)} == {mine}
    assert {path.name for path in mine.iterdir()} == {"node1", "node2"}


def test_a_connection_that_ended_between_two_cells(pool: DriverPool, cluster: Cluster) -> None:
    """Its sockets are still there, and nobody listens."""
    assert sessions_of_a_job(pool, cluster) == [0, 0]
    end_masters(cluster)
    assert len(forward_sockets()) == 2
    assert sessions_of_a_job(pool, cluster) == [0, 0]


def test_a_first_connection_that_ends_is_opened_once_more(
    pool: DriverPool, cluster: Cluster, undo: ExitStack, tmp_path: Path
) -> None:
    """As by a host that many log into at once (MaxStartups)."""
    launcher.let_go()
    count = tmp_path / "count"
    as_a_client(
        cluster,
        undo,
        f'case "$*" in *"-T "*" node2 "*) echo . >> {count}; test $(wc -l < {count}) = 1 && exit 255;; esac',
    )
    assert sessions_of_a_job(pool, cluster) == [0, 0]
    assert count.read_text() == ".\n.\n"


def test_a_host_to_which_no_connection_lasts_is_named(pool: DriverPool, cluster: Cluster, undo: ExitStack) -> None:
    launcher.let_go()
    as_a_client(cluster, undo, 'case "$*" in *"-T "*" node2 "*) exit 255;; esac')
    with pytest.raises(LaunchError, match=r"^node2: the connection was closed\n"):
        begin(pool)


def test_sockets_that_were_deleted(pool: DriverPool, cluster: Cluster) -> None:
    """By another notebook at its end, with which this one shares them, or by what tidies up."""
    job = begin(pool)
    for path in forward_sockets():
        path.unlink()
    end(job)
    assert sessions_of_a_job(pool, cluster) == [0, 0]


def test_a_job_outlives_its_notebook_and_then_its_driver(pool: DriverPool, cluster: Cluster, undo: ExitStack) -> None:
    """The connection whose login it had is gone."""
    undo.callback(cluster.run, "node2", "rm", "-f", "/srv/enough")
    undo.callback(cluster.run, "node1", "rm", "-f", "/srv/enough")
    job = begin(pool)
    launcher.let_go()
    kill_driver(job)
    for node in ("node1", "node2"):
        cluster.write(node, "/srv/enough", "")
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason
