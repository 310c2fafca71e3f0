"""Starts the processes of a job's trackers (``trackers/``), and writes the history of the gauges for them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence

from ..protocol.errors import StoreError
from ..protocol.paths import JobPaths
from ..protocol.world import World
from ..store.gauges import GaugeFiles, append
from ..trackers.process import start

LOOK_SECONDS = 1.0
"""Seconds between two looks at the processes."""

MEASURE_SECONDS = 5.0
"""Seconds between two lines in the history of the gauges."""

STARTS = 3
"""How often a tracker's process is started for one job."""


class Trackers:
    """The processes outlive this driver. ``world``: the environment that they get; None for a later driver's own."""

    def __init__(self, paths: JobPaths, names: Sequence[str], world: World | None) -> None:
        self._paths, self._names = paths, tuple(dict.fromkeys(names))
        self._environ = dict(os.environ) if world is None else world.environ
        self._directory = "/" if world is None else world.cwd
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._starts: dict[str, int] = {}
        self._gauges = GaugeFiles(paths)
        self._looked = self._measured = float("-inf")

    def look(self, now: float) -> None:
        """Start what does not run, and note the gauges if it is time. ``now``: seconds on a monotonic clock."""
        if not self._names or now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        for name in self._names:
            process = self._processes.get(name)
            if (process is None or process.poll() is not None) and self._starts.get(name, 0) < STARTS:
                self._starts[name] = self._starts.get(name, 0) + 1
                with contextlib.suppress(OSError, StoreError):  # its absence is said where the run is shown
                    self._processes[name] = start(self._paths, name, self._environ, self._directory)
        if now - self._measured < MEASURE_SECONDS:
            return
        before = self._gauges.latest
        self._gauges.look()
        if self._gauges.latest is not before:
            self._measured = now
            with contextlib.suppress(OSError):
                append(self._paths, self._gauges.latest, time.time())
