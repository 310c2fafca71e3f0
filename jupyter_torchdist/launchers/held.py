"""On a node, below what an engine started there: the process of ``hold.py``, and what it starts.

Its classes are sent by value, so this file imports nothing of this package.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping


class Held:
    """It ends, with all that it started, with the process that made it. Raises ``RuntimeError``: it does not start."""

    def __init__(self, hold: str, name: str, address: str, environ: Mapping[str, str], *, scratch: str = "") -> None:
        """``hold``: the text of ``hold.py``. ``name``: of the node's directory below ``/tmp``.

        ``address``: of the node. ``environ``: of what it starts. ``scratch``: a directory of this job alone for
        replicas, deleted at the end but for files that a cell wrote.
        """
        self._directory = f"/tmp/torchdist-{os.getuid()}/{name}"
        ours = {"TORCHDIST_RUNTIME_DIR": self._directory, "TORCHDIST_NODE_ADDRESS": address}
        if scratch:
            ours["TORCHDIST_SCRATCH"] = scratch
        self.environ = {"VIRTUAL_ENV": sys.prefix, **environ, **ours}
        self.environ.pop("OMP_NUM_THREADS", None)  # the engine's choice, not meant for ranks
        self._holder = subprocess.Popen(
            [sys.executable, "-c", hold, self._directory, *filter(None, [scratch])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env=self.environ,
        )
        if self._holder.wait():
            assert self._holder.stderr is not None
            raise RuntimeError(self._holder.stderr.read().decode().strip().rpartition("\n")[2])

    def agents(self) -> bool:
        """Whether an agent runs: it has a socket while it does."""
        with contextlib.suppress(OSError):
            folders = [entry.path for entry in os.scandir(self._directory) if entry.name.startswith("agent-")]
            return any(os.path.exists(os.path.join(folder, "agent.sock")) for folder in folders)
        return False

    def end(self) -> None:
        """End what was started. Returns when nothing is left."""
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.stdout.read()
