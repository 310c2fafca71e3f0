"""The bed itself: hosts are apart from each other and from this machine, faults are what they say, nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster import node_python
from tests.cluster.cluster import Cluster
from tests.cluster.hosts import ROOT
from tests.cluster.layout import BedError
from tests.cluster.resetting import masters, reset
from tests.leaks import wait_until

PYTHON = str(node_python.PLACE / "bin/python")


def ssh(*words: str) -> str:
    """What the command printed; must succeed."""
    return subprocess.run(["ssh", *words], capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def connect(cluster: Cluster, node: str) -> socket.socket:
    """A connection to its sshd, whose greeting was read."""
    connection = socket.create_connection((cluster.address(node), 22), timeout=5)
    assert connection.recv(100).startswith(b"SSH-2.0")
    return connection


def reaches(cluster: Cluster, one: str, other: str, within: float = 10) -> bool:
    """Whether the other's sshd greets the one, in so many seconds."""
    greeting = f"exec 3<>/dev/tcp/{other}/22 && head -c 3 <&3"
    return cluster.run(one, "timeout", str(within), "bash", "-c", greeting, check=False).stdout == "SSH"


def is_cut_off(cluster: Cluster, one: str, other: str) -> bool:
    return not reaches(cluster, one, other, within=0.4)


def test_hosts_have_names_users_and_files_of_their_own(cluster: Cluster) -> None:
    assert ssh("node1", "hostname; whoami; pwd") == "node1\nroot\n/root"
    assert ssh("alice@node2", "hostname; whoami; pwd") == "node2\nalice\n/home/alice"
    for place in ("/root", "/home/alice", "/tmp", "/var/tmp", "/usr/local", "/etc", "/dev/shm", "/run"):
        cluster.write("node1", f"{place}/only-here", place)
        assert cluster.run("node1", "cat", f"{place}/only-here").stdout == place
        assert cluster.run("node2", "test", "-e", f"{place}/only-here", check=False).returncode
        assert not Path(place, "only-here").exists()

    def commands() -> list[str]:
        return cluster.run("node1", "ps", "-e", "-o", "comm=").stdout.split()

    # The agent of an earlier test may be there for two seconds more.
    assert wait_until(lambda: commands() == ["bash", "sshd", "ps"])


def test_hosts_have_torch_and_nothing_of_ours(cluster: Cluster) -> None:
    absent = ["jupyter_torchdist", "cloudpickle", "IPython", "ipykernel", "pytest"]
    code = f"""if True:
        import importlib.util, numpy, torch
        print(torch.ones(2).numpy().sum(), [name for name in {absent} if importlib.util.find_spec(name)])
    """
    assert cluster.run("node1", PYTHON, "-c", code).stdout == "2.0 []\n"
    assert cluster.run("node1", "test", "-e", str(ROOT / "pyproject.toml"), check=False).returncode
    assert "Read-only" in cluster.run("node1", "touch", f"{node_python.PLACE}/new", check=False).stderr


def test_peers_know_of_a_killed_host_and_not_of_one_without_power(cluster: Cluster) -> None:
    for path, text in {"/root/kept": "di", "/etc/kept": "sk", "/tmp/lost": ""}.items():
        cluster.write("node1", path, text)
    with connect(cluster, "node1") as connection:
        cluster.kill("node1")
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    cluster.start("node1")
    assert cluster.run("node1", "cat", "/root/kept", "/etc/kept").stdout == "disk"
    assert cluster.run("node1", "test", "-e", "/tmp/lost", check=False).returncode
    with connect(cluster, "node1") as connection:
        cluster.poweroff("node1")
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(1)
    assert cluster.pid("node1") is None
    with pytest.raises(BedError, match="node1 is off"):
        cluster.run("node1", "true")
    with pytest.raises(BedError, match="no host node9: there are node1, node2, node3"):
        cluster.start("node9")
    cluster.start("node1")
    assert ssh("node1", "hostname") == "node1"


def test_a_partition_is_between_two_hosts_until_it_heals(cluster: Cluster) -> None:
    assert reaches(cluster, "node1", "node2")
    cluster.partition("node1", "node2")
    assert is_cut_off(cluster, "node1", "node2")
    assert is_cut_off(cluster, "node2", "node1")
    assert reaches(cluster, "node1", "node3")
    assert ssh("node1", "hostname") == "node1"
    cluster.heal()
    assert reaches(cluster, "node1", "node2")


@pytest.mark.soak
def test_cables_ports_and_losses(cluster: Cluster) -> None:
    cluster.firewall("node2", 4711)
    assert reaches(cluster, "node1", "node2")
    cluster.firewall("node2", 22)
    assert is_cut_off(cluster, "node1", "node2")
    cluster.heal()
    cluster.link("node2", up=False)
    assert is_cut_off(cluster, "node1", "node2")
    cluster.link("node2", up=True)
    assert reaches(cluster, "node1", "node2")
    cluster.loss("node2", 100)
    assert is_cut_off(cluster, "node1", "node2")


@pytest.mark.soak
def test_a_slow_cable_delays_both_ways(cluster: Cluster) -> None:
    cluster.delay("node1", 50)
    started = time.monotonic()
    with socket.create_connection((cluster.address("node1"), 22), timeout=5):
        assert 0.1 <= time.monotonic() - started < 1
    cluster.delay("node1", 0)
    assert min(_seconds_to_connect(cluster, "node1") for _ in range(5)) < 0.05


def _seconds_to_connect(cluster: Cluster, node: str) -> float:
    started = time.monotonic()
    connect(cluster, node).close()
    return time.monotonic() - started


@pytest.mark.parametrize("direction", ["to", pytest.param("from", marks=pytest.mark.soak)])
def test_a_limit_holds_in_each_direction(cluster: Cluster, direction: str) -> None:
    cluster.limit("node1", 20)
    megabytes = 2
    data = f"head -c {megabytes}000000 /dev/zero"
    command = f"{data} | ssh node1 'cat >/dev/null'" if direction == "to" else f"ssh node1 {data} >/dev/null"
    started = time.monotonic()
    subprocess.run(command, shell=True, check=True)
    assert time.monotonic() - started > megabytes * 8 / 20 * 0.8  # the first 256 KiB go at once


@pytest.mark.soak
def test_dropped_connections_leave_processes_behind(cluster: Cluster) -> None:
    with subprocess.Popen(["ssh", "node1", "sleep 1000"], stderr=subprocess.DEVNULL) as client:
        assert wait_until(lambda: "sleep 1000" in cluster.processes("node1").values())
        cluster.drop_ssh("node1")
        assert client.wait(10) == 255
    assert ssh("node1", "hostname") == "node1"
    (pid,) = (pid for pid, command in cluster.processes("node1").items() if command == "sleep 1000")
    os.kill(pid, signal.SIGKILL)


def test_what_is_left_on_a_host_is_told_and_ended(cluster: Cluster) -> None:
    serve = "import socket, time; s = socket.create_server(('', 4711)); time.sleep(1000)"
    cluster.run("node3", "sh", "-c", f'exec {PYTHON} -c "{serve}" >/dev/null 2>&1 &')
    assert wait_until(lambda: cluster.listening("node3") == {4711})
    process, port = reset(cluster, patience=0)
    assert process.startswith("node3: process ") and "4711" in process
    assert port == "node3: port 4711 is open"
    assert not cluster.processes("node3") and not cluster.listening("node3")


def test_kept_connections_are_ended(cluster: Cluster, tmp_path: Path) -> None:
    control = Path("/tmp", f"td-{os.getpid()}-master")
    kept = ("-o", "ControlMaster=auto", "-o", "ControlPersist=60", "-S", str(control))
    subprocess.run(["ssh", *kept, "node1", "true"], check=True, stderr=subprocess.DEVNULL)
    assert masters(cluster) == [control]
    assert reset(cluster) == []
    assert masters(cluster) == [] and not control.exists()


def _traces() -> list[str]:
    """Interfaces and mounts of this machine."""
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    return [*(line.split()[0] for line in links.splitlines()), *Path("/proc/self/mounts").read_text().splitlines()]


def test_nothing_is_left_of_a_bed(python: Path, tmp_path: Path, lasting: set[int]) -> None:
    before = _traces()
    shared = tmp_path / "shared"
    shared.mkdir()
    cluster = Cluster.up(tmp_path / "bed", 1, python=python, shared=[shared])
    cluster.write("node1", shared / "file", "for all")
    assert (shared / "file").read_text() == "for all"
    cluster.delay("node1", 1)
    pids = [cluster.keeper, cluster.switch, cluster.pid("node1")]
    cluster.down()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert _traces() == before


UP = """
import sys
from pathlib import Path
from tests.cluster.cluster import Cluster
cluster = Cluster.up(Path(sys.argv[1]), 1, python=Path(sys.argv[2]))
print(cluster.keeper, cluster.pid("node1"), cluster.layout.interface, flush=True)
sys.stdin.read()
"""


def test_a_bed_ends_with_its_process(python: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", UP, str(tmp_path / "bed"), str(python)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        keeper, host, interface = owner.stdout.readline().split()
        owner.kill()
    places = [Path("/proc", keeper), Path("/proc", host), Path("/sys/class/net", interface)]
    assert wait_until(lambda: not any(place.exists() for place in places))


def test_the_command_line(python: Path, tmp_path: Path) -> None:
    def bed(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.cluster", "--directory", str(tmp_path / "bed"), *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert "up" in bed("ssh", "node1", "true").stderr
    assert "node1 are up" in bed("up", "1").stdout
    try:
        assert bed("ssh", "node1", "hostname").stdout == "node1\n"
        assert bed("exec", "node1", "sh", "-c", "hostname; exit 3").returncode == 3
        assert not bed("kill", "node1").returncode
        assert bed("exec", "node1", "true").stderr == "node1 is off\n"
        assert not bed("start", "node1").returncode
    finally:
        assert not bed("down").returncode
    assert not (tmp_path / "bed").exists()
