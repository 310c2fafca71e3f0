"""A cluster: the hosts, and what can go wrong between them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from jupyter_torchdist.protocol.process import ProcessId
from tests.cluster.hosts import OURS, Hosts, set_up, start_bed
from tests.cluster.layout import BedError, Folders, Layout
from tests.leaks import wait_until

KEEPER = "keeper.json"
"""The file that says which process is above all of the bed's."""


class Cluster(Hosts):
    """Where a method takes two names, one may be ``"caller"``: this machine, where the notebook is."""

    @staticmethod
    def up(
        directory: Path,
        nodes: int = 3,
        *,
        python: Path,
        shared: Sequence[Path] = (),
        read_only: Sequence[Path] = (),
        hidden: Sequence[Path] = OURS,
        stays: bool = False,
    ) -> Cluster:
        """Start hosts ``node1``, ``node2``, … whose files are in ``directory``.

        ``python``: what ``node_python.make`` made. ``shared``: folders that all hosts and this machine write to.
        ``read_only``: folders that they read, such as another Python. ``hidden``: folders that are empty on the hosts,
        where these would see them. ``stays``: beyond the end of this process.
        """
        layout = set_up(directory, nodes, Folders(python, shared, read_only, hidden))
        if stays:
            (layout.directory / "stays").touch()
        layout.save()
        bed = start_bed(layout)
        (layout.directory / KEEPER).write_text(json.dumps(ProcessId.of(bed.pid).to_json()))
        cluster = Cluster(layout, bed.pid, bed)
        try:
            cluster.start(*cluster.nodes)
        except BaseException:
            cluster.down()
            raise
        return cluster

    @staticmethod
    def load(directory: Path) -> Cluster:
        """The cluster that another process started there. Raises ``BedError`` when there is none."""
        try:
            keeper = ProcessId.from_json(json.loads((directory / KEEPER).read_text()))
        except OSError:
            raise BedError(f"no cluster in {directory}: start one with up") from None
        if not keeper.alive():
            raise BedError(f"the cluster in {directory} has ended: start one with up")
        return Cluster(Layout.load(directory), keeper.pid)

    # ------------------------------------------------------------------------------------------------------ faults

    def poweroff(self, node: str) -> None:
        """End it as a power cut does: its peers hear nothing."""
        self.link(node, up=False)
        self.kill(node)

    def link(self, node: str, up: bool) -> None:
        """Plug its cable in, or pull it out."""
        self._ip("link", "set", self._port(node), "up" if up else "down")

    def partition(self, one: str, other: str) -> None:
        """Nothing gets from the one to the other, nor back."""
        for source, target in ((one, other), (other, one)):
            self._drop(f"ether saddr {self.layout.mac(source)} ether daddr {self.layout.mac(target)}")

    def loss(self, node: str, percent: float) -> None:
        """As many of the frames to it, and of those from it, are lost: more than 0, to 0.1."""
        for end in ("saddr", "daddr"):
            self._drop(f"ether {end} {self.layout.mac(node)} numgen random mod 1000 <= {round(percent * 10) - 1}")

    def firewall(self, node: str, port: int | str, protocol: str = "tcp") -> None:
        """Drop what is sent to this port there; or to these, such as ``"1024-65535"``."""
        self._drop(f"ether daddr {self.layout.mac(node)} {protocol} dport {port}")

    def limit(self, node: str, mbit: float | None) -> None:
        """The rate of its cable in each direction; None for no limit."""
        ends = ((self.switch, self._port(node)), (self._pid(node), "eth0"))
        for pid, device in ends:
            _in_network(pid, "tc", "qdisc", "delete", "dev", device, "root", check=False)
            if mbit is not None:
                rate = ("rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms")
                _in_network(pid, "tc", "qdisc", "add", "dev", device, "root", "tbf", *rate)

    def delay(self, node: str, milliseconds: float) -> None:
        """All it sends and gets comes that much later, so an answer takes twice as long; 0 for no delay.

        A relay carries the frames between the host's port and another one of the switch.
        """
        port = self._port(node)
        self._end_delay(node)
        if not milliseconds:
            return
        far, slow = f"far{port}", f"slow{port}"
        self._ip("link", "add", slow, "type", "veth", "peer", far)
        for change in (f"{far} up", f"{slow} up", f"{port} nomaster", f"{slow} master switch"):
            self._ip("link", "set", *change.split())
        (self.layout.directory / f"{port}.log").unlink(missing_ok=True)
        self._order("delay", port, far, str(milliseconds))
        if not wait_until(lambda: "ready" in self._told(f"{port}.log")):
            raise BedError(f"the relay of {node} did not start: {self._told(f'{port}.log')}")

    def _end_delay(self, node: str) -> None:
        port = self.layout.port(node)
        if self._ip("link", "delete", f"slow{port}", check=False):  # the relay ends with its interface
            self._ip("link", "set", port, "master", "switch")

    def heal(self) -> None:
        """End all faults of the network. Hosts that are off stay off."""
        _in_network(self.switch, "nft", "flush", "chain", "bridge", "bed", "faults")
        for node in filter(self.pid, self.nodes):
            self._end_delay(node)
            self.limit(node, None)
            self.link(node, up=True)

    def _port(self, node: str) -> str:
        """The host's on the switch. Raises ``BedError`` when the host is off."""
        self._pid(node)
        return self.layout.port(node)

    def _ip(self, *words: str, check: bool = True) -> bool:
        return _in_network(self.switch, "ip", *words, check=check)

    def _drop(self, frames: str) -> None:
        _in_network(self.switch, "nft", f"add rule bridge bed faults {frames} counter drop")


def _in_network(pid: int, *command: str, check: bool = True) -> bool:
    """Run a command of this machine in the network of a process; whether it succeeded."""
    argv = ["nsenter", "--net", "--target", str(pid), *command]
    done = subprocess.run(argv, capture_output=True, text=True)
    if check and done.returncode:
        raise BedError(f"{' '.join(command)}: {done.stderr.strip()}")
    return not done.returncode
