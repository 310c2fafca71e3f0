"""A Ray cluster: the head on this machine, which takes no work, and one node on each host of a bed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import Any

from tests.cluster import node_python
from tests.cluster.cluster import Cluster
from tests.cluster.layout import CALLER
from tests.frugal import lean_path
from tests.leaks import wait_until

PATIENCE = 60.0

SETTINGS = {
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}
"""Of Ray: no process without work, and a node that has no power is given up soon."""

START = ("-c", "from ray.scripts.scripts import main; main()", "start", "--block", "--disable-usage-stats")

PORTS = ("dashboard-agent-grpc-port", "dashboard-agent-listen-port", "runtime-env-agent-port", "metrics-export-port")
"""With these given, a node waits for none of its helpers, which a busy machine starts late."""

ASK = """
import json, os, sys
sys.modules["rfc3987_syntax"] = None
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # where Ray prints what it hears of the cluster
import ray
ray.init(address=sys.argv[1], namespace="jupyter_torchdist", log_to_driver=False, logging_level="ERROR")
for line in sys.stdin:
    print(json.dumps(eval(line)), file=answers, flush=True)
"""
"""A process that answers expressions about the cluster."""

NODES = "sum(node['Alive'] for node in ray.nodes())"
LEFT = """[one['name'] for one in ray.util.placement_group_table().values() if one['state'] != 'REMOVED'] + \
[one['name'] for one in ray.util.list_named_actors(all_namespaces=True)]"""


def free_ports(count: int) -> list[int]:
    opened = [socket.socket() for _ in range(count)]
    for each in opened:
        each.bind(("", 0))
    ports = [each.getsockname()[1] for each in opened]
    for each in opened:
        each.close()
    return ports


class RayCluster:
    """``bed``: its hosts have a Python with torch and Ray. A node has 4 CPUs, and says that it has 2 GPUs."""

    def __init__(self, bed: Cluster) -> None:
        self.bed = bed
        self.directory = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a socket's path is short
        self._started: list[subprocess.Popen[bytes]] = []
        self._asked: subprocess.Popen[str] | None = None
        self.address = ""

    def up(self) -> None:
        """Returns when the nodes wait for work."""
        port, *ports = free_ports(1 + len(PORTS))
        self.address = f"{self.bed.address(CALLER)}:{port}"
        place = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self.directory}"]
        command = [sys.executable, *START, *place, *_resources(self.bed.address(CALLER), ports, cpus=0)]
        self._start("head", command, {**os.environ, "PYTHONPATH": lean_path()})
        assert wait_until(self._listens, PATIENCE), self.told("head")
        for node in self.bed.nodes:
            self.start_node(node)
        assert wait_until(lambda: self.ask(NODES) == 1 + len(self.bed.nodes), PATIENCE), self.told("head")

    def start_node(self, node: str) -> None:
        settings = [f"{name}={value}" for name, value in SETTINGS.items()]
        command = ["env", *settings, str(node_python.PLACE / "bin/python"), *START, f"--address={self.address}"]
        command += _resources(self.bed.address(node), list(range(52364, 52364 + len(PORTS))), cpus=4, gpus=2)
        self.bed.run(
            node, "sh", "-c", f"{shlex.join(command)} </dev/null >/tmp/ray.out 2>&1 &"
        )  # it ends with its host

    def _start(self, name: str, command: list[str], environ: dict[str, str]) -> None:
        with open(self.directory / f"{name}.out", "wb") as log:
            self._started.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**environ, **SETTINGS},
                    start_new_session=True,
                )
            )

    def _listens(self) -> bool:
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), 1.0).close()
        except OSError:
            return False
        return True

    def told(self, name: str) -> str:
        return (self.directory / f"{name}.out").read_text()

    @property
    def processes(self) -> list[int]:
        """Of this machine: the head, and the one that answers."""
        asked = [self._asked.pid] if self._asked else []
        return [*asked, *(process.pid for process in self._started)]

    def ask(self, expression: str) -> Any:
        """The value of an expression of ``ray``, in a process that is connected to the cluster."""
        if self._asked is None or self._asked.poll() is not None:
            with open(self.directory / "asked.out", "a") as log:
                self._asked = subprocess.Popen(
                    [sys.executable, "-c", ASK, self.address],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,
                )
        assert self._asked.stdin is not None and self._asked.stdout is not None
        self._asked.stdin.write(expression + "\n")
        self._asked.stdin.flush()
        return json.loads(self._asked.stdout.readline() or "null")

    @contextmanager
    def taken(self, cpus: int) -> Iterator[None]:
        """Another one's placement group holds so many CPUs of each node meanwhile."""
        bundles = [{"CPU": cpus}] * len(self.bed.nodes)
        made = f"globals().update(other=ray.util.placement_group({bundles!r}, 'STRICT_SPREAD', 'other'))"
        self.ask(made)
        assert self.ask("other.wait(30)")
        yield
        self.ask("ray.util.remove_placement_group(other)")

    def left(self) -> list[str]:
        """Placement groups, actors, and processes of jobs on the nodes."""
        found = [str(name) for name in self.ask(LEFT)]
        for node in filter(self.bed.pid, self.bed.nodes):
            found += [f"{node}: {said}" for said in self.bed.processes(node).values() if "jupyter_torchdist" in said]
        return found

    def down(self) -> None:
        """End the head and the nodes."""
        if self._asked is not None:
            self._asked.kill()
            self._asked.communicate()
        for process in reversed(self._started):
            process.send_signal(signal.SIGTERM)
        for process in self._started:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        rmtree(self.directory, ignore_errors=True)


def _resources(address: str, ports: list[int], cpus: int, gpus: int = 0) -> list[str]:
    words = [f"--node-ip-address={address}", f"--num-cpus={cpus}", f"--num-gpus={gpus}"]
    words += ['--resources={"accelerator_type:A100": 1}'] if gpus else []
    return words + [f"--{name}={port}" for name, port in zip(PORTS, ports, strict=True)]
