"""The hosts of a bed: their start, their end, and what runs on them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from jupyter_torchdist.protocol.process import start_ticks
from tests.cluster.layout import CALLER, BedError, Folders, Layout
from tests.leaks import command_of, wait_until

SCRIPTS = Path(__file__).parent
ROOT = SCRIPTS.parents[1]
OURS = (ROOT, Path(sys.prefix)) if sys.prefix != sys.base_prefix else (ROOT,)
"""Where this package and Jupyter are."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRON = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8"}
PROGRAMS = ("ip", "nft", "nsenter", "sshd", "ssh", "tc", "unshare")
PATIENCE = 30.0
"""Seconds that a host may take to start or to end."""


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if not shutil.which(name, path=f"{PATH}:{os.environ.get('PATH', '')}")]


def refused() -> str:
    """Why this process may have no namespaces; empty when it may."""
    if os.geteuid():
        return "not root"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True
    )
    return tried.stderr.strip()


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _pid_namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def listening_ports(pid: int) -> set[int]:
    """Ports of TCP and UDP on which somebody listens in the process's network."""
    states = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}  # LISTEN; CLOSE of a socket that has no peer
    found = set()
    for name, state in states.items():
        table = Path(f"/proc/{pid}/net/{name}")
        rows = [line.split() for line in table.read_text().splitlines()[1:]] if table.exists() else []
        found |= {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == state}
    return found


def _claim() -> int:
    """A number for the bed. The pair of interfaces made here is both the claim and the cable to this machine."""
    for number in range(256):
        name = f"torchdist{number}"
        made = subprocess.run(
            ["ip", "link", "add", name, "address", f"02:77:{number:02x}:00:00:fe", "type", "veth", "peer", f"{name}p"],
            capture_output=True,
            text=True,
        )
        if not made.returncode:
            return number
        if "File exists" not in made.stderr:
            raise BedError(f"no interface for the bed's network: {made.stderr.strip()}")
    raise BedError("256 beds are up on this machine: end some of them")


class Hosts:
    """Made by ``up`` or, in another process, by ``load``."""

    def __init__(self, layout: Layout, keeper: int, bed: subprocess.Popen[bytes] | None = None) -> None:
        self.layout = layout
        self.keeper = keeper
        """The process above all of the bed's, as this machine counts them."""
        self._bed = bed
        self._orders = os.open(layout.orders, os.O_RDWR)  # a bed without ``stays`` ends when this is closed

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.layout.nodes

    @property
    def ssh_config(self) -> Path:
        """For ``ssh -F``."""
        return self.layout.ssh_config

    @property
    def bin(self) -> Path:
        """A folder with an ``ssh`` that knows the hosts; to be the first of ``PATH``."""
        return self.layout.bin

    def address(self, node: str) -> str:
        return self.layout.address(node)

    @property
    def switch(self) -> int:
        """PID 1 of the bed, which has the switch."""
        for pid in children(self.keeper):
            return pid
        raise BedError("the bed has ended: " + self._told("bed.log"))

    def pid(self, node: str) -> int | None:
        """PID 1 of the host, as this machine counts it; None when the host is off."""
        self.layout.check(node)
        for switch in children(self.keeper):
            for parent in children(switch):
                if command_of(parent).endswith(f"/host.sh {node}"):
                    return next(iter(children(parent)), None)
        return None

    def _pid(self, node: str) -> int:
        if pid := self.pid(node):
            return pid
        raise BedError(f"{node} is off")

    # ---------------------------------------------------------------------------------------------- starts and ends

    def _order(self, *words: str) -> None:
        os.write(self._orders, " ".join(words).encode() + b"\n")

    def start(self, *nodes: str) -> None:
        """Switch these hosts on and wait until they take connections; one that is on already stays as it is.

        A host has the files that it had, except in ``/tmp``, ``/var/tmp``, ``/run`` and ``/dev/shm``.
        """
        off = [node for node in nodes if not self.pid(node)]
        for node in off:
            (self.layout.directory / node / "console.log").unlink(missing_ok=True)
            self._order("boot", node)
        for node in off:
            if not wait_until(partial(self._is_up, node), PATIENCE):
                raise BedError(f"{node} did not start in {PATIENCE:.0f} s: {self._told(f'{node}/console.log')}")

    def _is_up(self, node: str) -> bool:
        """Raises ``BedError`` when it never will be."""
        if pid := self.pid(node):
            return 22 in listening_ports(pid)
        if not start_ticks(self.keeper):
            raise BedError("the bed has ended: " + self._told("bed.log"))
        if told := self._told(f"{node}/console.log"):
            raise BedError(f"{node} could not start: {told}")
        return False

    def _told(self, log: str) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.layout.directory / log).read_text()
        return ""

    def kill(self, node: str) -> None:
        """End its PID 1, and so all its processes. The kernel closes their connections, so peers know at once."""
        if pid := self.pid(node):
            os.kill(pid, signal.SIGKILL)
            if not wait_until(lambda: not self.pid(node), PATIENCE):
                raise BedError(f"{node} did not end")

    def down(self) -> None:
        """End everything of the bed. Its folder stays."""
        with contextlib.suppress(BedError, ProcessLookupError):
            os.kill(self.switch, signal.SIGKILL)
        wait_until(lambda: not start_ticks(self.keeper), PATIENCE)
        if self._bed:
            self._bed.wait()
        release(self.layout)
        os.close(self._orders)

    # ------------------------------------------------------------------------------------------ what runs on a host

    def command(self, node: str, *argv: str) -> list[str]:
        """How this machine runs a command there as root, in ``/``, without ssh; with ``ENVIRON``."""
        return ["nsenter", "--all", "--target", str(self._pid(node)), *argv]

    def run(self, node: str, *argv: str, text: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run ``command``. ``text`` is its input; with ``check`` it must succeed."""
        done = subprocess.run(self.command(node, *argv), env=ENVIRON, input=text, capture_output=True, text=True)
        if check and done.returncode:
            raise BedError(f"{node}: {' '.join(argv)}: code {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def write(self, node: str, path: str | Path, text: str) -> None:
        self.run(node, "install", "-D", "--mode", "644", "/dev/stdin", str(path), text=text)

    def _all_processes(self, node: str) -> dict[int, str]:
        pid = self._pid(node)
        space = _pid_namespace(pid)
        found = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
        return {each: command_of(each) for each in found if each != pid and _pid_namespace(each) == space}

    def processes(self, node: str) -> dict[int, str]:
        """Commands by pid, as this machine counts them; without PID 1 and the sshd that listens."""
        found = self._all_processes(node)
        return {pid: command for pid, command in found.items() if command and "/usr/sbin/sshd -D" not in command}

    def listening(self, node: str) -> set[int]:
        """Ports of TCP and UDP other than 22."""
        return listening_ports(self._pid(node)) - {22}

    def drop_ssh(self, node: str) -> None:
        """End the connections that sshd has there. What they started lives on, and new connections are taken."""
        for pid, command in self.processes(node).items():
            if command.startswith("sshd"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def set_up(directory: Path, nodes: int, folders: Folders) -> Layout:
    """Write the files of a bed, and claim its number."""
    directory.mkdir(parents=True, exist_ok=True)
    layout = Layout(directory.resolve(), _claim(), tuple(f"node{number}" for number in range(1, nodes + 1)))
    try:
        layout.write(folders)
        os.mkfifo(layout.orders)
        for command in (["addr", "add", f"{layout.address(CALLER)}/24", "dev"], ["link", "set", "up", "dev"]):
            subprocess.run(["ip", *command, layout.interface], check=True)
    except BaseException:
        release(layout)
        raise
    return layout


def release(layout: Layout) -> None:
    """Give the number back. A bed that ended does so, too, a moment later."""
    subprocess.run(["ip", "link", "delete", layout.interface], capture_output=True)


def start_bed(layout: Layout) -> subprocess.Popen[bytes]:
    """Returns its keeper."""
    network = os.open("/proc/self/ns/net", os.O_RDONLY)
    arguments = [str(layout.directory), str(SCRIPTS), sys.executable, str(network)]
    with open(layout.directory / "bed.log", "w") as log:
        bed = subprocess.Popen(
            [
                "unshare",
                "--net",
                "--mount",
                "--pid",
                "--fork",
                "--kill-child",
                "bash",
                str(SCRIPTS / "bed.sh"),
                *arguments,
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[network],
        )
    os.close(network)
    return bed
