"""``python -m jupyter_torchdist.driver --zygote`` starts a driver for each job; ``--attach JOB_ROOT`` takes one up.

The zygote has the agent and a warm process started before the first job comes, and keeps them until the end of
its standard input: then the kernel is gone. Where no rank can run on this machine, it only keeps the next driver
ready (``--spare``).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from ..launchers import registry
from ..launchers.local import LocalLauncher
from ..protocol.errors import ChannelError, LaunchError
from ..protocol.paths import JobPaths
from ..protocol.plan import NodePlan
from ..protocol.process import PROC, ProcessId
from ..protocol.wire.channel import Channel
from ..protocol.world import World
from ..store.jobdir import read_spec
from ..store.journal import JournalInUse
from ..store.sole import Sole
from . import zygote
from .run import Driver

_HERE = NodePlan("node0", (0,))


def main(words: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if words == ["--zygote"] and PROC:
        warmth = Warmth()
        warmth.keep()
        zygote.serve(zygote.forking(warmth.drive), warmth.keep)
    elif words == ["--zygote"]:
        spares = zygote.Spares([sys.executable, "-m", "jupyter_torchdist.driver", "--spare"])
        spares.keep()
        zygote.serve(spares, spares.keep)
    elif words == ["--spare"]:
        zygote.wait_for_a_job(_drive_line)
    elif words[:1] == ["--attach"] and len(words) == 2:
        _drive(JobPaths(Path(words[1])))
    else:
        raise SystemExit(__doc__)


class Warmth:
    """A connection that keeps the agent alive, with a warm process for jobs with this environment."""

    def __init__(self) -> None:
        self._channel: Channel | None = None

    def keep(self) -> None:
        """Connect unless connected. The agent may not have started yet, or it was stopped or died."""
        if self._channel is not None:
            try:
                while self._channel.receive():
                    continue
                return
            except (EOFError, ChannelError):
                self._let_go()
        try:
            self._channel = LocalLauncher().connect(_HERE)
            self._channel.send({"type": "hello", "process": ProcessId.mine().to_json()})
            self._channel.send({"type": "warm", "python": sys.executable, "environ": dict(os.environ)})
        except (LaunchError, ChannelError) as error:
            print(error, file=sys.stderr)  # the job that needs the agent reports it to the user again
            self._let_go()

    def drive(self, value: zygote.Line) -> None:
        """Run in a forked driver, which opens its own connection."""
        self._let_go()
        _drive_line(value)

    def _let_go(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _drive_line(value: zygote.Line) -> None:
    """The driver's commands, such as ssh, find what they find in the notebook now, without what ranks alone have."""
    paths, world = JobPaths(Path(value["job_root"])), World.from_json(value["world"])
    of_ranks = {item.partition("=")[0] for item in read_spec(paths).options.env}
    os.environ.update({name: text for name, text in world.environ.items() if name not in of_ranks})
    _drive(paths, world, value["blobs"])


def _drive(paths: JobPaths, world: World | None = None, blobs: str = "") -> None:
    with Sole(f"driver-{paths.job}") as sole:
        if not sole:
            return
        try:
            driver = Driver(paths, registry.launcher, world, blobs)
        except JournalInUse as error:  # a driver whose lock file was lost, or on another host
            print(error, file=sys.stderr)
            return
        driver.run()


if __name__ == "__main__":
    main(sys.argv[1:])
