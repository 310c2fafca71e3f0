"""Clusters of Spark, which Spark itself starts for an application: ``local-cluster[workers,cores,megabytes]``."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tests.leaks import command_of

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

    def left(self) -> list[str]:
        """Processes, and what jobs had on their nodes."""
        places = (f"/tmp/torchdist-{os.getuid()}", f"{tempfile.gettempdir()}/torchdist-scratch-{os.getuid()}")
        folders = [str(path) for place in places for path in Path(place).glob("torchdist-*")]
        return [*(f"{pid} {command_of(pid)}" for pid in self.processes()), *folders]
