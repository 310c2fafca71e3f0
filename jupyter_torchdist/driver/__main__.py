"""``python -m jupyter_torchdist.driver --spare`` waits for a job on standard input; ``--attach JOB_ROOT`` takes one up.

A spare driver has its agent connected and a warm process started before the first job comes; at the end of
its standard input (the kernel is gone) it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
from pathlib import Path

from ..launch.local import LocalLauncher
from ..protocol import codec
from ..protocol.channel import Channel
from ..protocol.errors import ChannelError, LaunchError
from ..protocol.paths import JobPaths, make_private, runtime_dir
from ..protocol.plan import NodePlan
from ..protocol.process import ProcessId
from .run import Driver, World

_HERE = NodePlan("node0", (0,))


def main(words: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if words[:1] == ["--spare"]:
        _spare()
    elif words[:1] == ["--attach"] and len(words) == 2:
        _drive(JobPaths(Path(words[1])), None)
    else:
        raise SystemExit(__doc__)


def _spare() -> None:
    """Warm up, wait for one line, drive that job."""
    channel = _warm_up()
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return
    value = codec.loads(line)
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    try:
        _drive(JobPaths(Path(value["job_root"])), World.from_json(value))
    finally:
        if channel is not None:
            channel.close()


def _warm_up() -> Channel | None:
    """A connection that keeps the agent alive, and a warm process for jobs of this environment."""
    try:
        channel = LocalLauncher().connect(_HERE)
        channel.send({"type": "hello", "process": ProcessId.mine().to_json()})
        channel.send({"type": "warm", "python": sys.executable, "environ": dict(os.environ)})
    except (LaunchError, ChannelError) as error:
        print(error, file=sys.stderr)  # said again, to the user, by the job that needs the agent
        return None
    return channel


def _drive(paths: JobPaths, world: World | None) -> None:
    with _sole_driver(paths.job) as sole:
        if sole:
            Driver(paths, LocalLauncher(), world).run()


class _sole_driver(contextlib.AbstractContextManager[bool]):
    """A lock on this machine's own disk, as locks are not to be had on every network file system."""

    def __init__(self, job: str) -> None:
        self._path = make_private(runtime_dir()) / f"driver-{job}.lock"

    def __enter__(self) -> bool:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._path.write_text(str(os.getpid()))
        return True

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._fd)


if __name__ == "__main__":
    main(sys.argv[1:])
