"""Where a benchmark runs: a data directory, warm processes and a kernel of its own; torchrun for the yardsticks."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jupyter_torchdist.protocol.paths import Home, JobPaths
from jupyter_torchdist.store.jobdir import read_manifest
from tests.leaks import processes_of_runtime, wait_until
from tests.notebook import Notebook

STAMP = '''
import os, pathlib, time

def stamp(name, value=None):
    """Write down when this rank was here (the clock is the same for all processes of the machine), or a value."""
    value = time.monotonic() if value is None else value
    pathlib.Path({marks!r}, name + "-" + os.environ["RANK"]).write_text(repr(value))
'''


@dataclass(frozen=True)
class Ranks:
    """Which ranks are measured: how many, and on what."""

    count: int
    backend: str

    @property
    def line(self) -> str:
        """The options of ``%%distribute``."""
        return f"--{'gpus' if self.backend == 'nccl' else 'ranks'} {self.count}"

    @property
    def joins(self) -> str:
        """What a script says to begin as our ranks do: their device chosen, their process group up."""
        if self.backend != "nccl":
            return f"dist.init_process_group({self.backend!r})"
        device = 'torch.device("cuda", int(os.environ["LOCAL_RANK"]))'
        return f'torch.cuda.set_device({device}); dist.init_process_group("nccl", device_id={device})'


TWO_ON_CPUS = Ranks(2, "gloo")


@dataclass
class Stage:
    """A place for one group of benchmarks; everything in it ends and vanishes with the context."""

    root: Path
    runtime: Path
    marks: Path
    ranks: Ranks
    environ: dict[str, str] = field(default_factory=dict)

    @staticmethod
    @contextlib.contextmanager
    def open(ranks: Ranks = TWO_ON_CPUS) -> Iterator[Stage]:
        root = Path(tempfile.mkdtemp(prefix="tdb-", dir="/tmp"))
        stage = Stage(root, root / "run", root / "marks", ranks)
        stage.marks.mkdir()
        stage.environ = {
            "TORCHDIST_HOME": str(root / "home"),
            "TORCHDIST_RUNTIME_DIR": str(stage.runtime),
            "TORCHDIST_SCRATCH": str(root / "scratch"),
        }
        try:
            yield stage
        finally:
            stage.end_warm()
            shutil.rmtree(root, ignore_errors=True)

    @property
    def home(self) -> Home:
        return Home(Path(self.environ["TORCHDIST_HOME"]))

    def notebook(self, load: bool = True) -> Notebook:
        notebook = Notebook(self.root, self.environ)
        notebook.run(STAMP.format(marks=str(self.marks)))
        if load:
            notebook.load()
            self.warm_up(notebook)
        return notebook

    def warm_up(self, notebook: Notebook) -> None:
        """Until torch is imported in the zygote and a first job has run."""
        notebook.run(f"%%distribute {self.ranks.line}\nstamp('warm')", timeout=120)
        time.sleep(1.0)

    def end_warm(self) -> None:
        """Wait for the idle processes to end; whatever does not is a fault, said and then killed."""
        if not wait_until(lambda: not processes_of_runtime(self.runtime), timeout=20):
            left = processes_of_runtime(self.runtime)
            print(f"  still there 20 s after their last connection: {left}", flush=True)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def stamps(self, name: str) -> list[float]:
        """The moments or values of that name, by rank; they are taken away, so that none is read twice."""
        files = sorted(self.marks.glob(f"{name}-*"))
        values = [float(file.read_text()) for file in files]
        for file in files:
            file.unlink()
        assert values, f"no rank was at {name!r}"
        return values

    def pids(self, notebook: Notebook) -> list[int]:
        """Kernel, driver, agent, zygote, launcher and ranks."""
        return [notebook.pid, *(pid for pid in processes_of_runtime(self.runtime) if pid != notebook.pid)]

    def blobs(self) -> dict[str, int]:
        """Digest and size of all blobs."""
        return {file.name: file.stat().st_size for file in self.home.blobs.iterdir() if file.is_file()}

    def data_written(self, before: dict[str, int]) -> int:
        """Bytes of new blobs, less the text of the newest job's cell, which is new in every cell."""
        jobs = [path for path in self.home.jobs.iterdir() if not path.name.startswith(".")]
        newest = max(jobs, key=lambda path: (path / "spec.json").stat().st_mtime_ns)
        text = read_manifest(JobPaths(newest)).linecache.digest
        return sum(size for name, size in self.blobs().items() if name not in before and name != text)

    def forget_blobs(self) -> None:
        """Free the disk of large blobs that no later cell refers to."""
        for file in list(self.home.blobs.rglob("*")):
            if file.is_file() and file.stat().st_size > 2**20:
                file.unlink()

    def script(self, name: str, body: str) -> Path:
        """A script for torchrun, with ``stamp``."""
        path = self.root / f"{name}.py"
        path.write_text(STAMP.format(marks=str(self.marks)) + body)
        return path


@dataclass(frozen=True)
class Ran:
    """A yardstick's process: when it was started, when it had ended, what it wrote to stderr and when."""

    begun: float
    ended: float
    lines: tuple[tuple[float, str], ...]

    def seen(self, text: str) -> float:
        return next(when for when, line in self.lines if text in line)


def torchrun(script: Path, ranks: int = 2, environ: Mapping[str, str] | None = None) -> Ran:
    """``torchrun --standalone``, from a shell, as one would without us."""
    module = "torch.distributed.run"  # the program torchrun, in whichever environment this one is
    command = [sys.executable, "-m", module, "--standalone", f"--nproc-per-node={ranks}", str(script)]
    begun = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=script.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
    )
    assert process.stderr
    lines = tuple((time.monotonic(), line) for line in process.stderr)
    process.wait()
    return Ran(begun, time.monotonic(), lines)


def pss(pid: int) -> int:
    """Proportional set size in bytes: shared pages are divided among their processes. 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)


def peak_memory(stage: Stage, notebook: Notebook, code: str) -> int:
    """By how many bytes the memory of all our processes together rises above what it was before the cell."""
    peak = 0
    done = threading.Event()

    def total() -> int:
        return sum(map(pss, stage.pids(notebook)))

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, total())
            done.wait(0.01)

    before = total()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        notebook.run(code)
    finally:
        done.set()
        watcher.join()
    return peak - before
