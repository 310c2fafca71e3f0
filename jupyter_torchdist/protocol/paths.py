"""The names of all files and sockets. Pure functions, except ``make_private``."""

from __future__ import annotations

import os
import pwd
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def is_safe(name: str) -> bool:
    """Whether ``name`` may be the name of one of our files."""
    return bool(_SAFE.fullmatch(name))


def user_name(user: int) -> str:
    """Of the user with this number: ``alice``, ``the user 1003``."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"the user {user}"


def safe_name(name: str) -> str:
    """``name`` if it can be one component of a path; else raises ``ValueError``. This prevents path traversal."""
    if not is_safe(name):
        raise ValueError(f"{name!r} cannot name a file")
    return name


def _jupyter_data_dir() -> Path:
    """The directory of jupyter_core's ``jupyter_data_dir``, without importing it (nodes have no Jupyter)."""
    if path := os.environ.get("JUPYTER_DATA_DIR"):
        return Path(path)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Jupyter"
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "jupyter"


def home() -> Home:
    """The data directory: ``$TORCHDIST_HOME``, else ``torchdist`` below the Jupyter data directory."""
    path = os.environ.get("TORCHDIST_HOME")
    return Home(Path(path).expanduser().absolute() if path else _jupyter_data_dir() / "torchdist")


def runtime_dir() -> Path:
    """Node-local directory for sockets and locks, never on NFS.

    It is short enough for the path of a socket: 103 bytes on macOS, 107 on Linux.
    """
    if path := os.environ.get("TORCHDIST_RUNTIME_DIR"):
        return Path(path)
    if (path := os.environ.get("XDG_RUNTIME_DIR")) and os.path.isdir(path):
        return Path(path) / "torchdist"
    return Path("/tmp") / f"torchdist-{os.getuid()}"


def queue_dir() -> Path:
    """Where the jobs of all users of this machine say which GPUs they have or wait for."""
    return Path(os.environ.get("TORCHDIST_QUEUE", "/tmp/torchdist-queue"))


def scratch_dir(environ: Mapping[str, str]) -> Path:
    """Node-local directory for the job replicas of nodes that do not share the driver's disk."""
    path = environ.get("TORCHDIST_SCRATCH")
    return Path(path) if path else Path(environ.get("TMPDIR", "/tmp")) / f"torchdist-scratch-{os.getuid()}"


def make_private(path: Path) -> Path:
    """Create ``path`` with mode 0700, parents too. Raises ``PermissionError`` if another user owns it.

    This includes a symbolic link of another user to a directory of this user, because anyone can write to ``/tmp``.
    """
    for folder in reversed([path, *path.parents]):  # mkdir makes parents as the umask says, which may be 0
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
    status = path.stat()
    if {status.st_uid, path.lstat().st_uid} != {os.getuid()}:
        raise PermissionError(f"{path} belongs to another user")
    if status.st_mode & 0o077:
        path.chmod(0o700)
    return path


@dataclass(frozen=True)
class Home:
    """The data directory, shared by kernel, CLI, server and driver."""

    root: Path

    @property
    def blobs(self) -> Path:
        return self.root / "blobs"

    @property
    def wheels(self) -> Path:
        """Packages for hosts (``driver/wheels.py``): a directory for each list of them."""
        return self.root / "wheels"

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    @property
    def catalog(self) -> Path:
        """The cache of the summaries. Each host has its own: SQLite's locks are not reliable between hosts."""
        host = re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())
        return self.root / f"catalog-{host}.sqlite"

    def blob(self, digest: str) -> Path:
        return self.blobs / safe_name(digest)

    def job(self, job: str) -> JobPaths:
        return JobPaths(self.jobs / safe_name(job))

    def draft(self, job: str) -> JobPaths:
        """The directory in which a job is created before it is renamed. Blobs are not deleted while it exists."""
        return JobPaths(self.jobs / f".creating-{safe_name(job)}")


@dataclass(frozen=True)
class JobPaths:
    """The files of one job. A node without the driver's disk has a replica of the same layout."""

    root: Path

    @property
    def job(self) -> str:
        return self.root.name

    @property
    def spec(self) -> Path:
        return self.root / "spec.json"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.json"

    @property
    def journal(self) -> Path:
        """Changes of state; only the driver appends to it."""
        return self.root / "journal.jsonl"

    @property
    def driver(self) -> Path:
        """The job's driver: process identity and heartbeat, replaced by rename."""
        return self.root / "driver.json"

    @property
    def summary(self) -> Path:
        """The final ``JobState``; its presence means that the job has ended."""
        return self.root / "summary.json"

    @property
    def requests(self) -> Path:
        """One file for each request of a client (interrupt, kill); the driver removes it."""
        return self.root / "requests"

    @property
    def watched(self) -> Path:
        """An empty file, touched by the feed of every live view while the job runs (``store/presence.py``)."""
        return self.root / "watched"

    @property
    def tracking(self) -> Path:
        """What trackers write (``store/tracking.py``)."""
        return self.root / "tracking"

    def tracked(self, tracker: str) -> Path:
        """How far a tracker is; its process replaces the file by rename."""
        return self.tracking / f"{safe_name(tracker)}.json"

    def tracker_log(self, tracker: str) -> Path:
        """What the tracker's process prints."""
        return self.tracking / f"{safe_name(tracker)}.log"

    @property
    def measured(self) -> Path:
        """A history of the gauges of all nodes, for trackers; only the driver appends to it."""
        return self.root / "gauges.jsonl"

    @property
    def source(self) -> Path:
        """The unpacked local modules of the bundle; first on the ranks' ``sys.path``."""
        return self.root / "source"

    @property
    def work(self) -> Path:
        """The ranks' directory on a node that does not have the notebook's directory."""
        return self.root / "work"

    def profile(self, name: str) -> Path:
        """The timeline of all ranks, for Perfetto (``client/profiles.py``)."""
        return self.root / f"profile-{safe_name(name)}.json.gz"

    def clock(self, node: str) -> Path:
        """How many seconds the node's clock is ahead of the driver's (``ahead``); none for a node of this machine."""
        return self.root / f"clock-{safe_name(node)}.json"

    @property
    def results(self) -> Path:
        return self.root / "results"

    def result(self, rank: int) -> Path:
        return self.results / f"rank-{rank:05d}.pkl"

    def result_buffer(self, rank: int, index: int) -> Path:
        return self.results / f"rank-{rank:05d}.buf-{index:05d}"

    def error(self, rank: int) -> Path:
        """The pickled exception of a rank that failed."""
        return self.results / f"rank-{rank:05d}.err.pkl"

    @property
    def nodes(self) -> Path:
        return self.root / "nodes"

    def node(self, node: str) -> NodePaths:
        return NodePaths(self.nodes / safe_name(node))


@dataclass(frozen=True)
class NodePaths:
    """The files that one node writes. Each file has exactly one writer."""

    root: Path

    @property
    def gauges(self) -> Path:
        """The latest ``Gauges`` of the node's ranks; the agent replaces the file by rename."""
        return self.root / "gauges.json"

    @property
    def agent_events(self) -> Path:
        return self.root / "agent.events"

    @property
    def launcher_events(self) -> Path:
        return self.root / "launcher.events"

    @property
    def launcher_log(self) -> Path:
        """stdout and stderr of the launcher, and of a rank before its own files are open."""
        return self.root / "launcher.log"

    def rank_events(self, rank: int) -> Path:
        return self.root / f"rank-{rank:05d}.events"

    def out(self, rank: int) -> Path:
        return self.root / f"rank-{rank:05d}.out"

    def err(self, rank: int) -> Path:
        return self.root / f"rank-{rank:05d}.err"

    def times(self, rank: int) -> Path:
        """When the rank wrote its output (``store/times``)."""
        return self.root / f"rank-{rank:05d}.times"

    def metrics(self, rank: int) -> Path:
        """JSON lines: curves and progress (``td.log``, ``td.progress``, autolog)."""
        return self.root / f"rank-{rank:05d}.metrics"

    def display(self, rank: int) -> Path:
        """JSON lines: rich output (``display``, figures, the value of the last line)."""
        return self.root / f"rank-{rank:05d}.display"

    def items(self, rank: int) -> Path:
        """What a generator yields on the rank (``ranks/streams/items``)."""
        return self.root / f"rank-{rank:05d}.items"

    @property
    def waiting(self) -> Path:
        """One byte for each of the node's ranks, written by the rank: whether it waits in a collective."""
        return self.root / "waiting"

    @property
    def tally(self) -> Path:
        """Eight bytes for each of the node's ranks, written by the rank: its collectives entered and ended."""
        return self.root / "tally"

    @property
    def pace(self) -> Path:
        """What each of the node's ranks does, written by the rank (``ranks/streams/pace.py``)."""
        return self.root / "pace"

    @property
    def not_a_number(self) -> Path:
        """Exists after a rank of the node has reported that its loss is NaN."""
        return self.root / "nan"

    def stacks(self, rank: int) -> Path:
        """``faulthandler`` dumps (SIGUSR1)."""
        return self.root / f"rank-{rank:05d}.stacks"

    def recorder(self, rank: int) -> Path:
        """Dumps of torch's flight recorder, one JSON line each (``ranks/streams/recording.py``)."""
        return self.root / f"rank-{rank:05d}.recorder"

    @property
    def profile_requests(self) -> Path:
        """Each line asks the node's ranks for a profile (``ProfileRequest``); the agent appends to it."""
        return self.root / "profile-requests"

    def profile(self, rank: int, name: str) -> Path:
        """What torch's profiler saw of the rank (``ranks/profiling/timeline.py``)."""
        return self.root / f"rank-{rank:05d}.profile-{safe_name(name)}"

    def nccl(self, rank: int) -> Path:
        """NCCL's log; NCCL appends a dot and the process's number."""
        return self.root / f"rank-{rank:05d}.nccl"

    @property
    def nccl_dump(self) -> Path:
        """What NCCL's watchdog dumps at a time-out, pickled; torch appends the rank."""
        return self.root / "nccl-dump-"
