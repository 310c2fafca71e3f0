"""Another machine than that of the test, as far as hosts can tell: with its own jobs, connections and drivers."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from shutil import rmtree

from jupyter_torchdist.client import Job
from jupyter_torchdist.client.job import attach_to
from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.store import catalog
from tests.cluster.cells import PATIENCE, PYTHON

MACOS = Path(__file__).with_name("macos")


class Laptop:
    within: tuple[str, ...] = ()
    """The words of a command that runs what is started there."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="td-", dir="/tmp"))
        self.home = Home(self._directory / "home")
        own = {"TORCHDIST_HOME": str(self.home.root), "TORCHDIST_RUNTIME_DIR": str(self._directory / "r")}
        self.environ = {**os.environ, **own}
        self._started: list[subprocess.Popen[str]] = []

    def words(self, verb: str, *options: str) -> list[str]:
        command = [sys.executable, "-m", "jupyter_torchdist", verb]
        return [*self.within, *command, "--host-option", f"python={PYTHON}", *options]

    def run(self, verb: str, *options: str) -> subprocess.CompletedProcess[str]:
        words = self.words(verb, *options)
        return subprocess.run(words, env=self.environ, capture_output=True, text=True, timeout=2 * PATIENCE)

    def start(self, verb: str, *options: str) -> subprocess.Popen[str]:
        """It is ended by ``close`` at the latest."""
        words = self.words(verb, *options)
        pipe = subprocess.PIPE
        self._started.append(subprocess.Popen(words, env=self.environ, stdout=pipe, stderr=pipe, text=True))
        return self._started[-1]

    def job(self, text: str) -> Job:
        """Only to look at."""
        return attach_to(catalog.find(text, self.home), self.home)

    def close(self) -> None:
        """After its connections were ended, and its jobs."""
        for process in self._started:
            process.kill()
            process.communicate()
        rmtree(self._directory, ignore_errors=True)


class Mac(Laptop):
    """Without /proc, /dev/shm, and the calls that only Linux has (``macos/``)."""

    def __init__(self) -> None:
        super().__init__()
        bare = self._directory / "bare"
        bare.mkdir()
        self.within = ("unshare", "--mount", "bash", str(MACOS / "within.sh"), str(bare))
        self.environ["PYTHONPATH"] = os.pathsep.join([str(MACOS), os.environ.get("PYTHONPATH", "")])
