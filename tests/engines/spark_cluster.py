"""Clusters of Spark: ``local-cluster[workers,cores,megabytes]``, which is one application's, and one that lasts."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.engines.ray_cluster import free_ports
from tests.leaks import command_of, wait_until

MASTER = "local-cluster[2,2,1024]"
"""Two workers, each with two cores, and an executor's default of memory."""

SPARK_VARIABLES = {
    "SPARK_LOCAL_IP": "127.0.0.1",
    "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # Java starts in half the time
}


class SparkCluster:
    """``home``: of Spark, of this session alone."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def processes(self, word: str = "") -> list[int]:
        """Of Spark's Java, with ``word`` in the command line."""
        found = {int(entry): command_of(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
        return [pid for pid, command in found.items() if str(self.home) in command and word in command]

    def executors(self) -> list[int]:
        return self.processes("CoarseGrainedExecutorBackend")

    @contextmanager
    def lasting(self, cores: int) -> Iterator[str]:
        """A master and a worker, which run meanwhile. Gives the URL of the master."""
        (port,) = free_ports(1)
        url, classes = f"spark://127.0.0.1:{port}", "org.apache.spark.deploy"
        master = [f"{classes}.master.Master", "--host", "127.0.0.1", "--port", str(port)]
        worker = [f"{classes}.worker.Worker", "--cores", str(cores), "--memory", "4g", "--host", "127.0.0.1"]
        worker += ["--work-dir", str(self.home / "work"), url]
        with ExitStack() as stack:
            for name, *words in (master, worker):
                process = subprocess.Popen(
                    [str(self.home / "bin/spark-class"), name, "--webui-port", "0", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "SPARK_HOME": str(self.home)},
                )
                stack.callback(process.wait)
                stack.callback(process.terminate)
                assert wait_until(lambda: listens(port))
            yield url

    def left(self) -> list[str]:
        """Processes, and what jobs had on their nodes."""
        places = (f"/tmp/torchdist-{os.getuid()}", f"{tempfile.gettempdir()}/torchdist-scratch-{os.getuid()}")
        folders = [str(path) for place in places for path in Path(place).glob("torchdist-*")]
        return [*(f"{pid} {command_of(pid)}" for pid in self.processes()), *folders]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
